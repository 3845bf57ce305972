"""The last tokens of answers that have ended, for the lookups of those to come.

The rows of a batch are often of one kind, and their answers share long passages. One n-gram is
looked up a round, and indexed when an answer ends. What one finds here another one wrote: not for
requests of people who may not read each other's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from homespec.decoding.types import TokenId

SHARED_TOKENS = 16_384
LONGEST = 32
"""Tokens of a match that are told; a longer one is no surer."""

_END = -1  # after each answer: no match and no draft runs from one into the next


class AnswerStore:
    """Finds where an ended answer had the last few tokens of a text, the latest place only."""

    def __init__(self, capacity: int = SHARED_TOKENS, ngram: int = 4) -> None:
        """capacity: tokens kept; the older half goes where there is no room. ngram: least match."""
        self._capacity, self._length = capacity, ngram
        self._tokens = array("i")
        # Hash of an n-gram -> position of the token that followed it last. A hash takes a third of
        # the memory of its tokens, which are compared anyway.
        self._next: dict[int, int] = {}

    def add(self, tokens: Sequence[TokenId]) -> None:
        """Keep an answer."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._tokens.append(_END)
        if len(self._tokens) > self._capacity:
            del self._tokens[: -(self._capacity // 2)]
            self._next.clear()
            start = 0
        for position in range(start + self._length, len(self._tokens)):
            gram = self._tokens[position - self._length : position + 1]
            if _END not in gram:
                self._next[hash(tuple(gram[:-1]))] = position

    def find(
        self, committed: Sequence[TokenId], max_tokens: int, beyond: int = 0
    ) -> tuple[int, tuple[TokenId, ...]]:
        """(length of the match, what followed it); (0, ()) for a match not longer than `beyond`."""
        if beyond >= LONGEST:
            return 0, ()
        position = self._next.get(hash(tuple(committed[-self._length :])))
        if position is None:
            return 0, ()
        length = self._common(committed, position)
        if length < self._length or length <= beyond:
            return 0, ()
        following = self._tokens[position : position + max_tokens]
        end = following.index(_END) if _END in following else len(following)
        return length, tuple(following[:end])

    def _common(self, committed: Sequence[TokenId], position: int) -> int:
        """How far back the text before `position` and the end of `committed` agree."""
        length, limit = 0, min(position, len(committed), LONGEST)
        while length < limit and self._tokens[position - 1 - length] == committed[-1 - length]:
            length += 1
        return length
