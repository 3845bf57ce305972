"""The values that pass between target, drafter and loop, and the protocols they keep."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TokenId = int
Row = Any  # what a target returns for one position; only its sampler looks inside


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse probability distribution over token ids.

    ids: (n,) int32, no id twice. probabilities: (n,) float64, summing to 1. Tokens not listed
    have probability 0.
    """

    ids: NDArray[np.int32]
    probabilities: NDArray[np.float64]

    @classmethod
    def point(cls, token: TokenId) -> Distribution:
        """All mass on one token: a greedy choice, or a draft that was not sampled."""
        return cls(np.array([token], np.int32), np.ones(1))

    @classmethod
    def from_logits(cls, ids: NDArray[np.int32], logits: NDArray[np.floating[Any]]) -> Distribution:
        """Softmax of (n,) logits in float64; an id with a logit of -inf is dropped."""
        wide = logits.astype(np.float64)
        if np.isneginf(wide).any():
            kept = ~np.isneginf(wide)
            ids, wide = ids[kept], wide[kept]
        weights = np.exp(wide - wide.max())
        return cls(ids, weights / weights.sum())

    def probability(self, token: TokenId) -> float:
        """P(token); 0 where it is not listed."""
        found = np.flatnonzero(self.ids == token)
        return float(self.probabilities[found[0]]) if found.size else 0.0

    def sample(self, uniform: float) -> TokenId:
        """The token at quantile `uniform` in [0, 1): the inverse of the cumulative sum."""
        cumulative = np.cumsum(self.probabilities)
        index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow the committed ones.

    distributions: for a *sampled* draft, the q each token was drawn from, one per token; None for
    a deterministic draft (greedy or n-gram), whose q is a point mass. confidences: the largest
    probability where each token was chosen, for drafters that look. read_seconds: of the time
    it took, what went into reading more committed tokens than the last. num_drafted: tokens that a
    model computed, of which the last may have been found not worth proposing.
    """

    tokens: tuple[TokenId, ...] = ()
    distributions: tuple[Distribution, ...] | None = None
    source: str = "none"
    confidences: tuple[float, ...] | None = None
    read_seconds: float = 0.0
    num_drafted: int = 0


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the target made of a draft: the accepted tokens, then exactly one of its own.

    The last of `tokens` is *recovered* (drawn where the draft was rejected) or the *bonus* token
    (drawn after a draft that was accepted whole).
    """

    tokens: tuple[TokenId, ...]
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Round:
    """One draft, one verifying pass, and the tokens they committed."""

    draft: Draft
    tokens: tuple[TokenId, ...]  # committed, after the cut at end, stop or budget
    num_accepted: int  # of the draft, before that cut
    context_length: int  # tokens in the target's cache when the pass began
    num_evaluated: int  # tokens the verifying pass held
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0


class FinishReason(str, enum.Enum):
    """Why a generation ended; the values are those of the OpenAI API, plus `cancelled`."""

    STOP = "stop"  # an end-of-generation token or a stop string
    LENGTH = "length"  # the token budget or the context is used up
    CANCELLED = "cancelled"  # the caller stopped it


class CachedModel(Protocol):
    """A model with a key-value cache of one sequence.

    `tokens` is what the cache holds. `extend` either adds all its tokens or, on an exception,
    leaves the cache as it was.
    """

    n_ctx: int

    @property
    def tokens(self) -> list[TokenId]:
        """The tokens in the cache, in order; not to be changed."""
        ...

    def extend(self, tokens: Sequence[TokenId], num_rows: int) -> Sequence[Row]:
        """Append tokens in one pass; return a row for each of the last `num_rows` of them.

        Rows are valid until the next `extend`.
        """
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; raise when the cache cannot drop the rest."""
        ...


class Sampler(Protocol):
    """Turns a row into the target's distribution; its state advances on committed tokens only."""

    def distribution(self, row: Row) -> Distribution:
        """The filtered distribution of the next token."""
        ...

    def best(self, row: Row) -> TokenId:
        """The most likely token of the filtered distribution; the lowest id on a tie."""
        ...

    def prime(self, prompt: Sequence[TokenId]) -> None:
        """Note the prompt: penalties look back on it, a grammar does not."""
        ...

    def accept(self, token: TokenId) -> None:
        """Note a committed token (penalties and grammars look back on it)."""
        ...


class Drafter(Protocol):
    """Proposes tokens. It brings itself into line with `committed` on every call."""

    name: str

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """Up to `max_tokens` (>= 1) tokens to follow `committed`; an empty draft is no failure."""
        ...

    def observe(self, finished: Round) -> None:
        """Learn what became of the last proposal."""
        ...


class DepthPolicy(Protocol):
    """Chooses how many tokens to draft."""

    def depth(self) -> int:
        """The draft depth of the next round; 0 is plain decoding."""
        ...

    def observe(self, finished: Round) -> None:
        """Learn from a finished round."""
        ...
