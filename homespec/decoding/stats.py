"""Counters and clocks of a generation.

homespec keeps its own clocks: llama.cpp's counters book a verifying pass as prompt work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from homespec.decoding.types import Round

clock = time.perf_counter


@dataclass(slots=True)
class GenerationStats:
    """What a generation did and how long it took.

    Durations in seconds. The first round, which ends the prompt, is prompt work: decode figures
    count from the first token on, and leave that token out.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the cache
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prompt_seconds: float = 0.0  # evaluating the prompt, the pass of the first token included
    time_to_first_token_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # target passes after the first token
    sample_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_memory_bytes: int | None = None

    def record(self, finished: Round) -> None:
        """Count a round of decoding (any but the first)."""
        self.num_rounds += 1
        self.num_tokens += len(finished.tokens)
        self.draft_seconds += finished.draft_seconds
        self.verify_seconds += finished.verify_seconds
        self.sample_seconds += finished.sample_seconds
        drafted, source = len(finished.draft.tokens), finished.draft.source
        if not drafted:
            return
        self.num_drafted += drafted
        self.num_accepted += finished.num_accepted
        _count(self.drafted_by_source, source, drafted)
        _count(self.accepted_by_source, source, finished.num_accepted)
        missing = drafted - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for i in range(drafted):
            self.drafted_by_position[i] += 1
        for i in range(finished.num_accepted):
            self.accepted_by_position[i] += 1

    def record_first(self, finished: Round, seconds: float) -> None:
        """Count the round that ended the prompt, `seconds` after the start."""
        self.num_tokens += len(finished.tokens)
        self.prompt_seconds += finished.verify_seconds
        self.sample_seconds += finished.sample_seconds
        self.time_to_first_token_seconds = seconds

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verifying pass, the recovered or bonus token included."""
        return (self.num_tokens - 1) / self.num_rounds if self.num_rounds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens evaluated (not those found in the cache) per second."""
        fresh = self.num_prompt_tokens - self.num_cached_tokens
        return fresh / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return max(self.total_seconds - self.time_to_first_token_seconds, 0.0)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first one, per second."""
        return (self.num_tokens - 1) / self.decode_seconds if self.num_tokens > 1 else 0.0

    @property
    def other_seconds(self) -> float:
        """What neither prompt, draft, verify nor sampling explains."""
        known = self.prompt_seconds + self.draft_seconds + self.verify_seconds
        return max(self.total_seconds - known - self.sample_seconds, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """All counters, clocks and rates, ready for JSON."""
        counted = {name: getattr(self, name) for name in self.__dataclass_fields__}
        rates = (
            "acceptance_rate",
            "mean_acceptance_length",
            "prompt_tokens_per_second",
            "decode_tokens_per_second",
            "decode_seconds",
            "other_seconds",
        )
        return {**counted, **{name: getattr(self, name) for name in rates}}


def _count(counts: dict[str, int], key: str, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount
