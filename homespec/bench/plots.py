"""The report's plots, as SVG that takes its colours from the page: dark mode is the page's."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from homespec.bench.records import PARTS, BenchResult
from homespec.bench.summary import ALL, Figures
from homespec.tuning.plot import pyplot

WIDTH, HEIGHT = 5.0, 3.1  # inches of 72 units: 360 units fill a telephone without shrinking

# Colours that stand for the page's own: each is replaced by var(--name).
_INK, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#0300{i:02x}" for i in range(8))
_VARIABLES = {
    _INK: "ink",
    _GRID: "grid",
    **{colour: f"series-{i}" for i, colour in enumerate(_SERIES)},
}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "homespec",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
}

_MARKS = "osD^vP*X"  # colours are not all that tells arms apart


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: its name in the page, what it shows in a sentence, and the SVG."""

    name: str
    title: str
    caption: str
    svg: str


def plots(result: BenchResult, figures: Sequence[Figures]) -> list[Plot]:
    """Those that this result has figures for. Raises CannotRunError without matplotlib."""
    overall = [one for one in figures if one.category == ALL]
    chosen: list[tuple[str, str, str, Callable[[Any], None]]] = [
        (
            "speed",
            "Speed by category",
            "Tokens per second after the first, medians.",
            lambda axes: _speed(axes, result, figures),
        )
    ]
    if len(result.arms) > 1:
        chosen.append(
            (
                "ratio",
                f"Against {result.arm_names[0]}",
                "Ratio of decoding speed, prompt by prompt; the line is the median.",
                lambda axes: _ratios(axes, result, overall),
            )
        )
    if any(one.acceptance_by_position for one in overall):
        chosen.append(
            (
                "acceptance",
                "Acceptance by position",
                "Share of the tokens drafted at each place of a draft that were accepted.",
                lambda axes: _acceptance(axes, overall),
            )
        )
    chosen += [
        (
            "time",
            "Where the time goes",
            "Seconds of all answers.",
            lambda axes: _time(axes, [one for one in overall if sum(one.parts.values())]),
        ),
        (
            "depth",
            "Depth over time",
            "Tokens drafted a round: mean of the rounds of each answer, in the order of the run.",
            lambda axes: _depth(axes, result),
        ),
        (
            "memory",
            "Memory over time",
            "Resident memory of the process; with devices, what is in use on them.",
            lambda axes: _memory(axes, result),
        ),
        (
            "others",
            "Other programs",
            "Share of the processors that they took.",
            lambda axes: _others(axes, result),
        ),
    ]
    plt = pyplot()
    with plt.rc_context(_STYLE):
        return [Plot(*row[:3], _svg(plt, row[0], row[1], row[3])) for row in chosen]


def _svg(plt: Any, name: str, title: str, draw: Callable[[Any], None]) -> str:
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    draw(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # Ids are the page's, not the drawing's: with its name in front they are unique.
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _speed(axes: Any, result: BenchResult, figures: Sequence[Figures]) -> None:
    categories, arms = result.categories, result.arm_names
    height = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        rates = {one.category: one.decode_tokens_per_second for one in figures if one.arm == arm}
        at = [row + i * height for row in range(len(categories))]
        values = [rates[category] or 0.0 for category in categories]
        axes.barh(at, values, height, label=arm, color=_colour(i))
    centre = 0.4 - height / 2
    axes.set_yticks([row + centre for row in range(len(categories))], categories)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("tokens/s")
    _legend(axes)


def _ratios(axes: Any, result: BenchResult, overall: Sequence[Figures]) -> None:
    axes.axhline(1, color=_INK, lw=0.8)
    first = {(run.prompt, run.repeat): run for run in result.runs_of(0)}
    for arm in range(1, len(result.arms)):
        ratios = sorted(
            mine / theirs
            for run in result.runs_of(arm)
            if (other := first.get((run.prompt, run.repeat))) is not None
            and (mine := run.decode_tokens_per_second)
            and (theirs := other.decode_tokens_per_second)
        )
        axes.plot(
            range(1, len(ratios) + 1),
            ratios,
            _MARKS[arm % len(_MARKS)],
            ms=3.5,
            color=_colour(arm),
            label=result.arm_names[arm],
        )
        ratio = overall[arm].decode_ratio
        if ratio is not None:
            axes.axhline(ratio.median, color=_colour(arm), lw=1, ls="--")
            axes.axhspan(ratio.low, ratio.high, color=_colour(arm), alpha=0.15, lw=0)
    axes.set_xlabel("prompts, slowest first")
    axes.set_ylabel("ratio")
    _legend(axes)


def _acceptance(axes: Any, overall: Sequence[Figures]) -> None:
    for i, one in enumerate(overall):
        rates = one.acceptance_by_position
        if rates:
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                f"{_MARKS[i % len(_MARKS)]}-",
                ms=3.5,
                color=_colour(i),
                label=one.arm,
            )
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)


def _time(axes: Any, figures: Sequence[Figures]) -> None:
    left = [0.0] * len(figures)
    names = [one.arm.replace(",", ",\n") for one in figures]
    for i, part in enumerate(PARTS):
        seconds = [one.parts[part] for one in figures]
        axes.barh(names, seconds, 0.6, left, label=part, color=_colour(i))
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")
    _legend(axes)


def _depth(axes: Any, result: BenchResult) -> None:
    for i, name in enumerate(result.arm_names):
        runs = [run for run in result.runs_of(i) if run.depths]
        if runs:
            axes.plot(
                [run.began for run in runs],
                [sum(run.depths) / len(run.depths) for run in runs],
                f"{_MARKS[i % len(_MARKS)]}-",
                ms=3,
                lw=0.8,
                color=_colour(i),
                label=name,
            )
    axes.set(xlabel="seconds of the run", ylabel="tokens a round")
    axes.set_ylim(bottom=-0.05)
    _legend(axes)


def _memory(axes: Any, result: BenchResult) -> None:
    at = [sample.at for sample in result.samples]
    rss = [sample.rss_bytes / 2**20 for sample in result.samples]
    axes.plot(at, rss, color=_colour(0), label="resident")
    on_device = [(run.began, run.device_bytes / 2**20) for run in result.runs if run.device_bytes]
    if on_device:
        axes.plot(*zip(*on_device, strict=True), color=_colour(1), label="devices")
    axes.set(xlabel="seconds of the run", ylabel="MiB")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _others(axes: Any, result: BenchResult) -> None:
    at = [sample.at for sample in result.samples]
    shares = [100 * sample.others_cpu for sample in result.samples]
    axes.fill_between(at, shares, color=_colour(2), alpha=0.5, lw=0)
    axes.plot(at, shares, color=_colour(2), lw=1)
    axes.set(xlabel="seconds of the run", ylabel="%", ylim=(0, 100))


def _legend(axes: Any) -> None:
    """Above everything, where no bar or line can hide it, and as wide as the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        longest = max(map(len, labels))
        axes.figure.legend(loc="outside upper left", ncols=max(1, min(5, 55 // (longest + 6))))


def _colour(number: int) -> str:
    return next(itertools.islice(itertools.cycle(_SERIES), number, None))
