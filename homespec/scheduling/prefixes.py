"""Prompts that begin alike are read once: who holds the beginning, or is about to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from homespec.decoding.speculative import common_prefix_length
from homespec.llama.sequences import CachedSequence
from homespec.scheduling.job import Job

WORTHWHILE = 8
"""Tokens that two prompts must share before one waits for the other or takes up its cells."""


class KeptSequences:
    """Ended sequences whose cells stay for prompts to come, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: list[CachedSequence] = []

    def __iter__(self) -> Iterator[CachedSequence]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Tokens they hold."""
        return sum(len(sequence.tokens) for sequence in self._kept)

    def keep(self, sequence: CachedSequence) -> None:
        """Keep one more, in the place of the oldest where there is no room."""
        self._kept.append(sequence)
        while len(self._kept) > self.capacity:
            self.drop_oldest()

    def used(self, sequence: CachedSequence) -> None:
        """Note that a prompt began with it."""
        if sequence in self._kept:
            self._kept.remove(sequence)
            self._kept.append(sequence)

    def drop_oldest(self) -> bool:
        """Free the cells of one; whether there was one."""
        if not self._kept:
            return False
        self._kept.pop(0).close()
        return True


def longest_prefix(
    tokens: Sequence[int], held: Iterable[CachedSequence]
) -> tuple[int, CachedSequence | None]:
    """(length, sequence) of the longest beginning that is in the cache; the last token is not."""
    best: tuple[int, CachedSequence | None] = (0, None)
    for sequence in held:
        shared = min(common_prefix_length(sequence.tokens, list(tokens)), len(tokens) - 1)
        if shared > best[0]:
            best = (shared, sequence)
    return best if best[0] >= WORTHWHILE else (0, None)


def coming_prefix(tokens: Sequence[int], reading: Iterable[Job]) -> int:
    """How long a beginning those jobs will have read that are reading now."""
    return max(
        (
            min(common_prefix_length(job.committed, list(tokens)), len(tokens) - 1)
            for job in reading
        ),
        default=0,
    )
