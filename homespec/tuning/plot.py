"""Draws a profile: what passes cost, and the speed that is to be expected at each draft depth."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from homespec.disk import NAMED_HINT, whole_file
from homespec.errors import CannotRunError, UsageError
from homespec.tuning import fit
from homespec.tuning.profile import Profile

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(file: Path) -> None:
    """Raise now what would fail after minutes: another kind of file, no matplotlib, no folder."""
    if file.suffix not in SUFFIXES:
        raise UsageError(
            f"{file.name} is no kind of drawing.", hint=f"Name a {', '.join(SUFFIXES)} file."
        )
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"The folder {file.parent} is not there, or cannot be written.")
    pyplot()


def draw(profile: Profile, file: Path) -> None:
    """Write the drawing; whole or not at all. Raises CannotRunError without matplotlib."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_cost(left, profile)
    _draw_speed(right, profile)
    try:
        with whole_file(file, hint=NAMED_HINT) as part:
            figure.savefig(part, format=file.suffix[1:])
    finally:
        plt.close(figure)


def pyplot() -> Any:
    """matplotlib without a window. Raises CannotRunError where it is missing."""
    try:
        importlib.import_module("matplotlib").use("agg")  # an extra
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise CannotRunError(
            "Drawing needs matplotlib, which is not installed.",
            hint="Install homespec with its extra `plot`, or matplotlib beside it.",
        ) from exc


def _draw_cost(axes: Any, profile: Profile) -> None:
    curves = [("", "-", profile.target_cost)]
    if profile.strict_cost is not None:
        curves.append((" strictly exact", ":", profile.strict_cost))
    for name, style, curve in curves:
        for length, row in zip(curve.context_lengths, curve.table, strict=True):
            label = f"context {length}{name}"
            axes.plot(curve.widths, [1000 * s for s in row], f"o{style}", ms=3, label=label)
    axes.set(title="A pass of the target", xlabel="tokens", ylabel="milliseconds", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_speed(axes: Any, profile: Profile) -> None:
    axes.axhline(1, color="grey", lw=0.8)
    chance = profile.acceptance
    lines = [("draft model, greedy", chance.greedy, profile.draft_cost)]
    lines.append(("draft model, temperature 0.8", chance.sampled, profile.draft_cost))
    lines += [
        (f"lookup, match of {rate.length}", rate.rate, None)
        for rate in chance.ngram
        if rate.length in (3, 9, 22)
    ]
    for name, acceptance, cost in lines:
        if acceptance is not None:
            found = fit.predict(acceptance, profile.target_cost, cost)
            label = f"{name} ({acceptance:.2f})"
            axes.plot([p.depth for p in found], [p.speedup for p in found], label=label)
    axes.set(title="Expected speed", xlabel="draft depth", ylabel="ratio to plain decoding")
    axes.legend(frameon=False)
