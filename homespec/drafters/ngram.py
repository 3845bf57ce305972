"""Prompt lookup: what followed the last few tokens the last time they stood together.

After Saxena 2023 (prompt lookup decoding). Prompt and output are both looked up; the index grows
with the committed tokens, so a round costs a few dictionary look-ups and not a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from homespec.decoding.types import NO_DRAFT, Draft, Round, TokenId
from homespec.drafters.answer_store import LONGEST
from homespec.errors import UsageError

Gram = tuple[TokenId, ...]


class NgramDrafter:
    """Continues the longest matching n-gram, the latest place first."""

    name = "ngram"

    def __init__(self, max_ngram: int = 5, min_ngram: int = 2) -> None:
        """max_ngram, min_ngram: longest and shortest match tried, in tokens."""
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(
                f"N-gram lengths must satisfy 1 <= min <= max, not {min_ngram} and {max_ngram}."
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self.match_length = 0
        """Tokens that the last proposal's place and the end of the history have in common."""
        self._reset()

    def _reset(self) -> None:
        self._seen: list[TokenId] = []
        self._next: dict[Gram, int] = {}  # n-gram -> position of the token that followed it last

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """Up to `max_tokens` tokens; empty where no n-gram has stood before."""
        self._update(committed)
        seen = self._seen
        for n in self._lengths:
            position = self._next.get(tuple(seen[-n:])) if n < len(seen) else None
            if position is not None:
                self.match_length = self._common(position, n)
                return Draft(tuple(_continuation(seen, position, max_tokens)), source=self.name)
        self.match_length = 0
        return NO_DRAFT

    def _common(self, position: int, length: int) -> int:
        """How far back the texts before `position` and before the end agree; `length` is known."""
        seen, end = self._seen, len(self._seen)
        while (
            length < min(position, LONGEST)
            and seen[position - length - 1] == seen[end - length - 1]
        ):
            length += 1
        return length

    def _update(self, committed: Sequence[TokenId]) -> None:
        """Index what was committed since; start anew where the history is another one."""
        known = len(self._seen)
        if self._seen != list(committed[:known]):
            self._reset()
            known = 0
        self._seen.extend(committed[known:])
        # An n-gram is filed under the token that followed it: the last one has none yet.
        for position in range(max(known, 1), len(self._seen)):
            for n in self._lengths:
                if n <= position:
                    self._next[tuple(self._seen[position - n : position])] = position

    def observe(self, finished: Round) -> None:
        """Nothing to learn: the committed tokens come with the next call."""


def _continuation(seen: list[TokenId], position: int, count: int) -> list[TokenId]:
    """`count` tokens from `position` on, running into its own copy as LZ77 does.

    A text that repeats with a period shorter than `count` is so continued for the whole draft.
    """
    copied = seen[position : position + count]
    period = len(copied)
    return [copied[i % period] for i in range(count)]
