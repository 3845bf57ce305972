"""Prompt lookup: what followed the last few tokens the last time they stood together.

After Saxena 2023 (prompt lookup decoding), with the longest match of any length. Prompt and output
are both looked up; the index grows with the committed tokens, so a round costs no scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from homespec.decoding.types import NO_DRAFT, Draft, Round, TokenId
from homespec.drafters.answer_store import LONGEST
from homespec.drafters.suffix_automaton import SuffixAutomaton
from homespec.errors import UsageError


class NgramDrafter:
    """Continues the longest match, the latest place first."""

    name = "ngram"

    def __init__(self, min_ngram: int = 2) -> None:
        """min_ngram: the shortest match that is continued, in tokens."""
        if min_ngram < 1:
            raise UsageError(f"A match has at least one token, not {min_ngram}.")
        self._shortest = min_ngram
        self.match_length = 0
        """Tokens that the last proposal's place and the end of the history have in common."""
        self._reset()

    def _reset(self) -> None:
        self._seen: list[TokenId] = []
        self._index = SuffixAutomaton()

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """Up to `max_tokens` tokens; empty where no match is long enough."""
        self._update(committed)
        length, position = self._index.longest_repeat()
        if length < self._shortest:
            self.match_length = 0
            return NO_DRAFT
        self.match_length = min(length, LONGEST)
        return Draft(tuple(_continuation(self._seen, position, max_tokens)), source=self.name)

    def _update(self, committed: Sequence[TokenId]) -> None:
        """Index what was committed since; start anew where the history is another one."""
        known = len(self._seen)
        if self._seen != list(committed[:known]):
            self._reset()
            known = 0
        for token in committed[known:]:
            self._seen.append(token)
            self._index.append(token)

    def observe(self, finished: Round) -> None:
        """Nothing to learn: the committed tokens come with the next call."""


def _continuation(seen: list[TokenId], position: int, count: int) -> list[TokenId]:
    """`count` tokens from `position` on, running into its own copy as LZ77 does.

    A text that repeats with a period shorter than `count` is so continued for the whole draft.
    """
    copied = seen[position : position + count]
    period = len(copied)
    return [copied[i % period] for i in range(count)]
