"""What speed to expect of a draft, and which one to take.

A round that drafts k tokens, each accepted with chance a if those before it were, commits
(1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, eq. 1). It takes a target pass over k + 1
tokens and k of the draft's; after a draft that was accepted whole the draft reads two tokens first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from homespec.tuning.cost import CostCurve

CONTEXT_LENGTH = 600
"""Tokens in the cache for which speeds are predicted."""

MAX_DEPTH = 16
WORTH = 1.02  # gains below are noise, and not worth a file of hundreds of megabytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected speed at a draft depth, as ratio to plain decoding."""

    depth: int
    speedup: float


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens a round commits on average."""
    return sum(acceptance**i for i in range(depth + 1))


def round_seconds(
    acceptance: float, depth: int, target: CostCurve, draft: CostCurve | None, context_length: int
) -> float:
    """Seconds of a round; draft None: drafting costs nothing (lookup)."""
    seconds = target.seconds(depth + 1, context_length)
    if depth == 0 or draft is None:
        return seconds
    one, two = (draft.seconds(n, context_length) for n in (1, 2))
    return seconds + depth * one + acceptance**depth * (two - one)


def predict(
    acceptance: float,
    target: CostCurve,
    draft: CostCurve | None,
    context_length: int = CONTEXT_LENGTH,
) -> list[Prediction]:
    """The speed at each depth from 0, which is plain decoding, to MAX_DEPTH."""
    plain = target.seconds(1, context_length)
    return [
        Prediction(
            depth,
            expected_tokens(acceptance, depth)
            * plain
            / round_seconds(acceptance, depth, target, draft, context_length),
        )
        for depth in range(MAX_DEPTH + 1)
    ]


def best(
    acceptance: float,
    target: CostCurve,
    draft: CostCurve | None,
    context_length: int = CONTEXT_LENGTH,
) -> Prediction:
    """The fastest depth above 0: its speed says whether it pays."""
    drafting = predict(acceptance, target, draft, context_length)[1:]
    return max(drafting, key=lambda one: one.speedup)


def mean_best(
    acceptances: Sequence[float], target: CostCurve, draft: CostCurve | None
) -> Prediction:
    """The fastest depth for the first of several chances, with the mean of their best speeds.

    A draft is used greedily and sampled from; both count the same.
    """
    found = [best(chance, target, draft) for chance in acceptances]
    return Prediction(found[0].depth, sum(one.speedup for one in found) / len(found))


def beats(speedup: float, other: float) -> bool:
    """Whether a speed is higher by more than noise, and worth a file of its own."""
    return speedup >= WORTH * other
