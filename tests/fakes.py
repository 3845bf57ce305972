"""A model whose logits are a pure function of what its cache holds: a wrong rollback shows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from homespec.decoding.sampling import SamplingParams, reference_distribution
from homespec.decoding.types import NO_DRAFT, Distribution, Draft, Round
from numpy.typing import NDArray

Logits = Callable[[Sequence[int]], NDArray[np.float64]]


def hashed_logits(n_vocab: int, seed: int = 0, order: int = 3) -> Logits:
    """Logits from a hash of the last `order` tokens and of how many there are."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        key = zlib.crc32(repr((seed, len(tokens), list(tokens[-order:]))).encode())
        return np.random.default_rng(key).normal(size=n_vocab) * 2

    return logits


class FakeModel:
    """Keeps the CachedModel protocol; counts its passes, can fail on demand."""

    def __init__(self, logits: Logits, n_ctx: int = 64) -> None:
        self.logits, self.n_ctx = logits, n_ctx
        self.tokens: list[int] = []
        self.passes: list[int] = []
        self.fail_at: int | None = None  # pass number that is interrupted

    def extend(self, tokens: Sequence[int], num_rows: int) -> list[NDArray[np.float64]]:
        assert len(self.tokens) + len(tokens) <= self.n_ctx, "beyond the context"
        self.passes.append(len(tokens))
        if self.fail_at == len(self.passes):
            raise KeyboardInterrupt
        rows = []
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            if i >= len(tokens) - num_rows:
                rows.append(self.logits(self.tokens))
        return rows

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens), f"cannot keep {length} of {len(self.tokens)}"
        del self.tokens[length:]


class FakeSampler:
    """The reference filters; remembers what it was told to accept."""

    def __init__(self, params: SamplingParams | None = None) -> None:
        self.params = params or SamplingParams(temperature=0)
        self.accepted: list[int] = []

    def distribution(self, row: NDArray[np.float64]) -> Distribution:
        return reference_distribution(row, self.params)

    def best(self, row: NDArray[np.float64]) -> int:
        return int(np.argmax(row))

    def prime(self, prompt: Sequence[int]) -> None:
        self.accepted.clear()

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class ScriptedDrafter:
    """Drafts the target's own next tokens, wrong where `pattern` says so."""

    name = "scripted"

    def __init__(self, truth: Callable[[Sequence[int]], int], pattern: Sequence[bool]) -> None:
        self.truth, self.pattern = truth, pattern
        self.calls = 0
        self.rounds: list[Round] = []

    def propose(self, committed: Sequence[int], max_tokens: int) -> Draft:
        history, drafted = list(committed), []
        for _ in range(max_tokens):
            right = self.pattern[self.calls % len(self.pattern)] if self.pattern else True
            self.calls += 1
            best = self.truth(history)
            drafted.append(best if right else best ^ 1)
            history.append(drafted[-1])
        return Draft(tuple(drafted), source=self.name) if drafted else NO_DRAFT

    def observe(self, finished: Round) -> None:
        self.rounds.append(finished)
