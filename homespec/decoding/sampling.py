"""Sampling settings, and a plain numpy statement of the filters they name.

The engine filters with llama.cpp's own samplers; `reference_distribution` says in a few lines what
they are expected to compute, for tests and for fakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homespec.decoding.types import Distribution
from homespec.errors import UsageError

MAX_SEED = 2**32 - 1
_FLOAT, _INT = float(np.finfo(np.float32).max), 2**31 - 1  # the largest that llama.cpp's types hold


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a next token is chosen. Names and defaults are llama.cpp's.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, typical_p 1, repeat_penalty 1,
    dry_multiplier 0 and xtc_probability 0 switch their filter off. seed None draws one.
    grammar is GBNF text.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    f"{name} is {value}, but must lie between {low:g} and {high:g}.",
                    hint=f"Leave {name} out to take its default.",
                )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(
                f"seed is {self.seed}, but must lie between 0 and {MAX_SEED}.",
                hint="Leave the seed out to draw one.",
            )

    def within(self, n_ctx: int) -> SamplingParams:
        """With windows no longer than the context: no text fills more, and they are allocated."""
        return replace(
            self,
            repeat_last_n=min(self.repeat_last_n, n_ctx),
            dry_penalty_last_n=min(self.dry_penalty_last_n, n_ctx),
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def reshapes(self) -> bool:
        """Whether anything but temperature, cut-offs and banned tokens changes the best token."""
        return (
            self.repeat_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.dry_multiplier != 0
            or self.xtc_probability != 0
            or any(bias != -math.inf for _, bias in self.logit_bias)
            or self.grammar is not None
        )


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, _FLOAT),
    "top_k": (0, _INT),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repeat_penalty": (1e-6, _FLOAT),
    "repeat_last_n": (0, _INT),
    "presence_penalty": (-_FLOAT, _FLOAT),
    "frequency_penalty": (-_FLOAT, _FLOAT),
    "dry_multiplier": (0, _FLOAT),
    "dry_base": (1, _FLOAT),
    "dry_allowed_length": (0, _INT),
    "dry_penalty_last_n": (0, _INT),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
}


def reference_distribution(
    logits: NDArray[np.floating[Any]], params: SamplingParams
) -> Distribution:
    """Top-k, top-p, min-p, then temperature, in llama.cpp's order, on (n_vocab,) logits.

    Greedy params give a point mass on the lowest of the best ids.
    """
    if params.greedy:
        return Distribution.point(int(np.argmax(logits)))
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    for keep in (_nucleus(params.top_p), _min_p(params.min_p)):
        scores = np.exp(logits[order].astype(np.float64) - logits[order[0]])
        order = order[: keep(scores / scores.sum())]
    return Distribution.from_logits(order.astype(np.int32), logits[order] / params.temperature)


def _nucleus(top_p: float) -> Callable[[NDArray[np.float64]], int]:
    """Holtzman et al. 2019: the fewest best tokens whose mass reaches `top_p`."""
    if top_p >= 1:
        return len
    return lambda p: int(np.searchsorted(np.cumsum(p), top_p, side="left")) + 1


def _min_p(min_p: float) -> Callable[[NDArray[np.float64]], int]:
    """Nguyen et al. 2024: tokens at least `min_p` times as likely as the best."""
    return lambda p: max(1, int(np.count_nonzero(p >= min_p * p[0])))
