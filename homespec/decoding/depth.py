"""How many tokens to draft: a fixed number, or what gives the most tokens a second.

A round that drafts k tokens, each accepted with chance a_i if all before it were, commits

    E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k        tokens (Leviathan et al. 2023, eq. 1)

and takes T(k) = draft(k) + pass(k + 1) seconds. The best depth is that of the highest E / T; depth
0 is one of the choices, so what does not pay is not done.
"""

from __future__ import annotations

import math
import operator
import statistics
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from homespec.decoding.types import Round


class FixedDepth:
    """The same depth every round; 0 is plain decoding."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depth(self) -> int:
        """The draft depth of the next round."""
        return self._depth

    def observe(self, finished: Round) -> None:
        """Nothing to learn."""


class PassCost(Protocol):
    """A measured cost curve."""

    def seconds(self, num_tokens: int, context_length: int) -> float:
        """Seconds of a target pass over `num_tokens` with `context_length` in the cache."""
        ...


FEW = 2
"""Tokens of a draft whose price is only guessed."""

_SLOPE = 0.35  # of a pass of one token, for each further one: a guess until it is measured
_NEGLIGIBLE = 0.01  # a token accepted so seldom is not weighed
_GROUPS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129)
"""Widths at which a group begins: what passes of one group take beyond the curve is pooled."""

_WINDOW = 7  # passes of a group that are remembered
_STALE = 192  # passes after which the price of a plain one is asked anew, by ...
_AGAIN = 3  # ... so many: under 2 % of the passes
_OLD = 64  # passes after which what a wide one took is forgotten
_ASKING = 0.005  # of the time may be lost by asking sooner, where a draft hardly gains
_PRIOR_WORTH = 80.0  # observations; a text shows at most 1 / (1 - decay) = 25


class LearnedCost:
    """Seconds of a target pass: a curve, corrected by this run's own clocks.

    Without a curve the shape is guessed and the first passes give the scale. Medians of the last
    passes of neighbouring widths are kept, so that one disturbed pass changes nothing, and
    forgotten when they are old: the machine's other work may have ended since.

    llama.cpp prepares a pass anew when its width is not the last one's, on CUDA for longer than a
    small model computes. So what a plain pass takes too much right after a wider one is charged
    to the wider one.
    """

    def __init__(self, curve: PassCost | None = None) -> None:
        self._curve = curve
        self._ratios: dict[int, deque[float]] = {}  # by group, as what follows
        self._medians: dict[int, float] = {}
        self._timed: dict[int, int] = {}  # when, in passes
        self._nearest: dict[int, int] = {}  # the one nearest to it that was timed
        self._widest = 0  # pass that was timed
        self._passes = 0
        self._wider: int | None = None  # width of the last pass, where it had more than one token
        self._age = 0  # passes since a plain one was timed
        self._again = 0  # plain passes still to be timed anew

    @property
    def deepest_trial(self) -> int:
        """Tokens to draft on trial: few, as long as what they take is not known."""
        return sys.maxsize if self._curve else max(FEW, self._widest)

    def wants_plain(self, gain: float = math.inf) -> bool:
        """Whether passes should hold one token for a while: that price is out of date.

        The machine's other work may have ended since, and every draft is weighed against it. gain:
        of the draft at hand, as ratio to plain decoding. The less it is, the sooner the price is
        asked, for then a wrong one misleads, and asking costs little.
        """
        due = min(_STALE, max(_AGAIN, (gain - 1) / _ASKING))
        return self._age >= due or self._again > 0

    def seconds(self, num_tokens: int, context_length: int) -> float:
        """The expected seconds of a pass; inf before anything is known."""
        base = self._base(num_tokens, context_length)
        if not self._medians:
            return base if self._curve else math.inf
        group = _group(num_tokens)
        nearest = self._nearest.get(group)
        if nearest is None:
            nearest = min(self._medians, key=lambda other: abs(other - group))
            self._nearest[group] = nearest
        return base * self._medians[nearest]

    def observe(self, num_tokens: int, context_length: int, seconds: float) -> None:
        """Note a pass that was timed."""
        wider, self._wider = self._wider, num_tokens if num_tokens > 1 else None
        self._age += 1
        self._passes += 1
        if wider and num_tokens == 1 and _PLAIN in self._ratios:
            excess = seconds - self.seconds(1, context_length)
            group = _group(wider)
            self._ratios[group][-1] += excess / self._base(wider, context_length)
            self._medians[group] = statistics.median(self._ratios[group])
            return
        if num_tokens == 1:
            self._plain_again()
        self._forget_old()
        group = _group(num_tokens)
        if group not in self._ratios:
            self._ratios[group] = deque(maxlen=_WINDOW)
            self._nearest.clear()
        self._timed[group] = self._passes
        self._widest = max(self._widest, num_tokens)
        self._ratios[group].append(seconds / self._base(num_tokens, context_length))
        self._medians[group] = statistics.median(self._ratios[group])

    def _forget_old(self) -> None:
        """Take the prices of wide passes that were not timed lately for unknown, as at first."""
        if self._curve is None:
            return
        for group in [one for one, when in self._timed.items() if self._passes - when > _OLD]:
            if group != _PLAIN:
                for kept in (self._ratios, self._medians, self._timed):
                    del kept[group]
                self._nearest.clear()

    def _plain_again(self) -> None:
        """A plain pass is about to be noted: forget the old ones where they are out of date."""
        if self._age > _STALE and _PLAIN in self._ratios:
            self._ratios[_PLAIN].clear()
            self._again = _AGAIN
        self._again = max(self._again - 1, 0)
        self._age = 0

    def _base(self, num_tokens: int, context_length: int) -> float:
        if self._curve is not None:
            return self._curve.seconds(num_tokens, context_length)
        return 1.0 + _SLOPE * (num_tokens - 1)


def _group(num_tokens: int) -> int:
    return bisect_right(_GROUPS, num_tokens)


_PLAIN = _group(1)


class Rate:
    """A chance learned from yes and no, the lately seen counting more.

    prior: what is believed at first; weight: how many observations it is worth. What many texts
    have shown moves the prior (`fade`), so that the next text does not begin from a guess again.
    """

    __slots__ = ("_count", "_decay", "_hits", "_prior", "_weight")

    def __init__(self, prior: float, weight: float = 4.0, decay: float = 0.96) -> None:
        self._prior, self._weight, self._decay = prior, weight, decay
        self._hits = self._count = 0.0

    @property
    def value(self) -> float:
        """The present estimate."""
        return (self._hits + self._weight * self._prior) / (self._count + self._weight)

    def fade(self, kept: float = 0.3) -> None:
        """Let what was seen count less: the text is another one now."""
        known = self._count + _PRIOR_WORTH
        self._prior = (self._hits + _PRIOR_WORTH * self._prior) / known
        self._hits *= kept
        self._count *= kept

    def observe(self, hit: bool) -> None:
        """Count one outcome."""
        self._hits = self._hits * self._decay + hit
        self._count = self._count * self._decay + 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A depth, and what it promises: expected tokens of the round, and its seconds."""

    depth: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def best_depth(
    rates: Iterable[float],
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
) -> Choice:
    """The depth with the most expected tokens per second, 0 to as many as there are rates.

    rates: chance of acceptance of each drafted token, given all before it. pass_seconds(n): a
    target pass over n tokens. draft_seconds(k): drafting k tokens.
    """
    best = Choice(0, 1.0, pass_seconds(1))
    tokens = reach = 1.0
    for depth, rate in enumerate(rates, start=1):
        reach *= rate
        if reach < _NEGLIGIBLE:
            break
        tokens += reach
        choice = Choice(depth, tokens, pass_seconds(depth + 1) + draft_seconds(depth))
        if choice.rate > best.rate:
            best = choice
    return best


def best_depths(
    rates: Sequence[Sequence[float]], pass_seconds: Callable[[int], float], limit: int
) -> list[int]:
    """The depths of several sequences in one pass with the most expected tokens per second in all.

    rates: for each sequence, the chance of acceptance of each token it has drafted, given all
    before it. limit: the most drafted tokens in sum. With one sequence it is `best_depth` of a
    draft that costs nothing.
    """
    # A token counts with the chance that it is reached and accepted. That falls along a draft, so
    # the likeliest tokens of all are, however many are taken, a beginning of each draft.
    reached = [
        (reach, number)
        for number, chances in enumerate(rates)
        for reach in accumulate(chances, operator.mul)
    ]
    reached.sort(key=lambda one: -one[0])
    width = len(rates)
    tokens, best, best_rate = float(width), 0, width / pass_seconds(width)
    for count, (reach, _) in enumerate(reached[:limit], start=1):
        tokens += reach
        rate = tokens / pass_seconds(width + count)
        if rate > best_rate:
            best, best_rate = count, rate
    depths = [0] * width
    for _, number in reached[:best]:
        depths[number] += 1
    return depths
