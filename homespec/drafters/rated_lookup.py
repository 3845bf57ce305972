"""N-gram lookup that says, before it drafts, how likely each token is to be accepted.

Many sequences in a pass share what it can hold: their lookups are weighed against each other
(homespec.decoding.depth.best_depths), and all of them learn in one table.
"""

from __future__ import annotations

from collections.abc import Sequence

from homespec.decoding.types import NO_DRAFT, Draft, Round, TokenId
from homespec.drafters.adaptive import RateTable
from homespec.drafters.answer_store import AnswerStore
from homespec.drafters.ngram import NgramDrafter


class RatedLookup:
    """Drafts for one sequence; keeps the Drafter protocol.

    matches: the chance that a match of a length goes on, shared by the sequences. answers: of
    other sequences; the longest match there is taken where the own text has none as long.
    """

    name = "ngram"

    def __init__(
        self,
        matches: RateTable,
        ngram: NgramDrafter | None = None,
        answers: AnswerStore | None = None,
    ) -> None:
        self._matches, self._ngram, self._answers = matches, ngram or NgramDrafter(), answers
        self._match_length = 0  # of the last proposal
        self._found = NO_DRAFT  # by the last look, drafted or not
        self._looked_at = 0  # tokens; `rates` and `propose` of a round look once

    def rates(self, committed: Sequence[TokenId], max_tokens: int) -> list[float]:
        """Chance of acceptance, given all before it, of each token that could be drafted."""
        if max_tokens < 1:
            return []
        found = len(self._look(committed, max_tokens).tokens)
        return [self._matches[self._match_length + i].value for i in range(found)]

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """What followed the longest match, up to `max_tokens`."""
        if self._looked_at != len(committed):
            self._look(committed, max_tokens)
        return Draft(self._found.tokens[:max_tokens], source=self.name)

    def _look(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        self._looked_at = len(committed)
        self._found = self._ngram.propose(committed, max_tokens)
        self._match_length = self._ngram.match_length
        if self._answers is not None:
            length, tokens = self._answers.find(committed, max_tokens, beyond=self._match_length)
            if tokens:
                self._match_length = length
                self._found = Draft(tokens, source=self.name)
        return self._found

    def observe(self, finished: Round) -> None:
        """Learn from a round what the lookup had right, whether it was drafted or not."""
        self._ngram.observe(finished)
        self._matches.compare(self._match_length, self._found.tokens, finished.tokens)
        self._found, self._looked_at = NO_DRAFT, 0
