"""What a run can show: medians, and a bootstrap interval of the paired ratio.

Both arms answer the same prompt one after the other, so what is judged is the ratio of each pair.
The interval is the percentile bootstrap's over prompts (Efron 1979): prompts are drawn with
replacement, and the median of their ratios is taken each time. A prompt asked several times counts
once, with the geometric mean of its ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

CONFIDENCE = 0.99
"""Of the interval: one run in a hundred may see a difference where there is none."""

MIN_PAIRS = 8
"""Below it the interval of a median cannot reach that confidence: 1 - 2 / 2^8 is 0.992."""

_RESAMPLES = 10_000
Verdict = Literal["faster", "slower", "no difference"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, by the median over `count` prompts; low and high bound it."""

    median: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> Verdict:
        """What the interval shows; it shows no difference where it holds 1."""
        if self.count >= MIN_PAIRS:
            if self.low > 1:
                return "faster"
            if self.high < 1:
                return "slower"
        return "no difference"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "verdict": self.verdict, "confidence": CONFIDENCE}


def paired_ratio(ratios: Sequence[float], seed: int = 0) -> Ratio | None:
    """The median of positive ratios with its interval; None for none at all."""
    if not ratios:
        return None
    values = np.asarray(ratios, np.float64)
    draws = np.random.default_rng(seed).integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.median(values)), float(low), float(high), len(values))


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


def median(values: Sequence[float]) -> float | None:
    """The middle; None of nothing."""
    return float(np.median(values)) if len(values) else None


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of positive values as a share of them, by the median deviation.

    None of fewer than 8. A few values far off do not change it.
    """
    if len(values) < MIN_PAIRS:
        return None
    logs = np.log(values)
    return float(1.4826 * np.median(np.abs(logs - np.median(logs))))
