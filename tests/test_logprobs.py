"""Log-probabilities of tokens."""

from __future__ import annotations

import math

import numpy as np
from homespec.decoding.logprobs import token_logprobs


def test_they_are_the_logarithms_of_the_softmax() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32)) + 7
    found = token_logprobs(logits, 2, 3)
    assert math.isclose(found.logprob, math.log(0.2), abs_tol=1e-5)
    assert [token for token, _ in found.best] == [1, 3, 2]
    assert np.allclose([math.exp(logprob) for _, logprob in found.best], [0.4, 0.3, 0.2])


def test_none_of_the_best_and_more_than_there_are() -> None:
    logits = np.zeros(4, np.float32)
    assert token_logprobs(logits, 1, 0).best == ()
    assert [token for token, _ in token_logprobs(logits, 1, 9).best] == [0, 1, 2, 3]


def test_a_banned_token_does_no_harm() -> None:
    logits = np.array([0.0, -np.inf], np.float32)
    found = token_logprobs(logits, 1, 2)
    assert found.logprob == -math.inf
    assert found.best[0] == (0, 0.0)
