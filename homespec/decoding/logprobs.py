"""Log-probabilities of tokens, as the model has them before any filter."""

from __future__ import annotations

import math
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
    top = logits.max()
    # float32 terms are exact enough, and half as dear: this is done for each token.
    normalizer = float(top) + math.log(np.exp(logits - top).sum(dtype=np.float64))
    count = min(num_best, len(logits))
    best = np.argpartition(logits, -count)[-count:] if count else np.empty(0, np.int64)
    best = best[np.lexsort((best, -logits[best]))]  # ties by id
    pairs = tuple((int(one), float(logits[one]) - normalizer) for one in best)
    return TokenLogprobs(token, float(logits[token]) - normalizer, pairs)
