"""Log-probabilities of tokens, as the model has them before any filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homespec.decoding.types import TokenId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability, and the best ones of its place: (token, log-probability)."""

    token: TokenId
    logprob: float
    best: tuple[tuple[TokenId, float], ...] = ()


def token_logprobs(
    logits: NDArray[np.floating[Any]], token: TokenId, num_best: int
) -> TokenLogprobs:
    """Of (n_vocab,) logits; num_best may be 0."""
    wide = logits.astype(np.float64)
    top = wide.max()
    normalizer = top + np.log(np.exp(wide - top).sum())
    count = min(num_best, len(wide))
    best = np.argpartition(-wide, count - 1)[:count] if count else np.empty(0, np.int64)
    best = best[np.lexsort((best, -wide[best]))]  # ties by id
    pairs = tuple((int(one), float(wide[one] - normalizer)) for one in best)
    return TokenLogprobs(token, float(wide[token] - normalizer), pairs)
