"""A run in figures: for each arm and category, and what the run shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from homespec.bench.records import PARTS, BenchResult, Run, pairs
from homespec.bench.statistics import CONFIDENCE, Ratio, geometric_mean, median, paired_ratio

ALL = "all"


@dataclass(frozen=True, slots=True)
class Figures:
    """What an arm did in a category, or in `all`: medians over its runs, parts as sums.

    decode_ratio: how many times as fast as the first arm from the first token on, which is where
    arms differ; ratio: from end to end. Both None for the first arm itself.
    acceptance_by_position: chance that the token at that place of a draft was accepted, given that
    it was drafted. parts: seconds of all runs by PARTS; they add up to total_seconds. num_same of
    num_compared texts were the first arm's, largest_gap: of the logits where the others parted.
    """

    arm: str
    category: str
    num_runs: int
    first_token_seconds: float | None
    prompt_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    seconds: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    parts: dict[str, float]
    total_seconds: float
    rss_bytes: int | None
    device_bytes: int | None
    num_same: int
    num_compared: int
    largest_gap: float | None
    reported: dict[str, float]
    ratio: Ratio | None = None
    decode_ratio: Ratio | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        ratios = {
            name: ratio.as_dict() if ratio else None
            for name, ratio in (("ratio", self.ratio), ("decode_ratio", self.decode_ratio))
        }
        return {**asdict(self), **ratios}


def summarize(result: BenchResult) -> list[Figures]:
    """All arms in `all`, then in each category."""
    return [
        figures_of(result, arm, category)
        for category in (None, *result.categories)
        for arm in range(len(result.arms))
    ]


def figures_of(result: BenchResult, arm: int, category: str | None = None) -> Figures:
    """One arm's figures; category None is all."""
    runs = result.runs_of(arm, category)
    compared = [run for run in runs if run.same is not None]
    gaps = [run.difference.gap for run in runs if run.difference and run.difference.gap is not None]
    rounds = sum(run.num_rounds for run in runs)
    decoded = sum(run.num_tokens - 1 for run in runs if run.num_rounds)
    first = result.runs_of(0, category)
    return Figures(
        arm=result.arm_names[arm],
        category=category or ALL,
        num_runs=len(runs),
        first_token_seconds=median([run.first_token_seconds for run in runs]),
        prompt_tokens_per_second=_median_known(runs, lambda run: run.prompt_tokens_per_second),
        decode_tokens_per_second=_median_known(runs, lambda run: run.decode_tokens_per_second),
        seconds=median([run.seconds for run in runs]),
        mean_acceptance_length=decoded / rounds if rounds else None,
        acceptance_by_position=_by_position(runs),
        parts={part: sum(getattr(run, f"{part}_seconds") for run in runs) for part in PARTS},
        total_seconds=sum(run.seconds for run in runs),
        rss_bytes=max((run.rss_bytes for run in runs if run.rss_bytes), default=None),
        device_bytes=max((run.device_bytes for run in runs if run.device_bytes), default=None),
        num_same=sum(bool(run.same) for run in compared),
        num_compared=len(compared),
        largest_gap=max(gaps, default=None),
        reported=_reported(runs),
        ratio=ratio_of(first, runs, _end_to_end) if arm else None,
        decode_ratio=ratio_of(first, runs, decoding) if arm else None,
    )


def ratio_of(
    first: Sequence[Run], runs: Sequence[Run], measure: Callable[[Run], float | None]
) -> Ratio | None:
    """How many times as fast `runs` are as `first`, over the prompts both answered."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for run, other in pairs(runs, first):
        mine, theirs = measure(run), measure(other)
        if mine and theirs:
            by_prompt[run.prompt].append(theirs / mine)
    return paired_ratio([geometric_mean(values) for values in by_prompt.values()])


def _end_to_end(run: Run) -> float | None:
    return run.seconds_per_token


def decoding(run: Run) -> float | None:
    """Seconds per token after the first; None where there is none."""
    rate = run.decode_tokens_per_second
    return 1 / rate if rate else None


def _median_known(runs: Sequence[Run], value: Callable[[Run], float | None]) -> float | None:
    return median([known for run in runs if (known := value(run)) is not None])


def _by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    drafted = _sums([run.drafted_by_position for run in runs])
    accepted = _sums([run.accepted_by_position for run in runs])
    return tuple(a / d for a, d in zip(accepted, drafted, strict=True))


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Column by column; short rows end in zeros."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _reported(runs: Sequence[Run]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run.reported)
    found = {name: median([r.reported[name] for r in runs if name in r.reported]) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def verdicts(result: BenchResult) -> list[str]:
    """One sentence for each arm but the first, by its decoding: reading the prompt is all alike."""
    return [_verdict(result, arm) for arm in range(1, len(result.arms))]


def _verdict(result: BenchResult, arm: int) -> str:
    name, first = result.arm_names[arm], result.arm_names[0]
    figures = figures_of(result, arm)
    decode, whole = figures.decode_ratio, figures.ratio
    if decode is None or whole is None:
        return f"{name} cannot be compared with {first}: no prompt was answered by both."
    found = (
        f"decoding {decode.median:.3f} x ({decode.low:.3f} to {decode.high:.3f} at "
        f"{CONFIDENCE:.0%}, {decode.count} prompts), whole answers {whole.median:.3f} x"
    )
    if decode.verdict == "no difference":
        return f"{name} against {first}: no difference that this run can show; {found}."
    return f"{name} is {decode.verdict} than {first}: {found}{_extremes(result, arm)}."


def _extremes(result: BenchResult, arm: int) -> str:
    """Where it pays most and least."""
    found = {
        category: ratio.median
        for category in result.categories
        if (ratio := figures_of(result, arm, category).decode_ratio) is not None
    }
    if len(found) < 2:
        return ""
    best, worst = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return f"; most in {best} ({found[best]:.2f} x), least in {worst} ({found[worst]:.2f} x)"
