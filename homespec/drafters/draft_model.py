"""A second, smaller model proposes; it may be greedy, or sample from its own distribution."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from homespec.decoding.speculative import common_prefix_length
from homespec.decoding.stats import clock
from homespec.decoding.types import (
    NO_DRAFT,
    CachedModel,
    Distribution,
    Draft,
    Round,
    Row,
    Sampler,
    TokenId,
)
from homespec.decoding.verify import Uniform

logger = logging.getLogger(__name__)


class Guide(Protocol):
    """Decides, token by token, how far a draft goes. It must not look at drawn tokens."""

    def take(self, position: int, confidence: float) -> bool:
        """Whether to propose the token at `position` (from 0), of which the draft is so sure."""
        ...

    def go_on(self, position: int) -> bool:
        """Whether to draft a token at `position`."""
        ...


class DraftModelDrafter:
    """Drafts with a model of its own.

    sampler: the draft's filters. uniform: for sampled drafts, the source of randomness; None
    drafts greedily. p_min: stop where the draft's best token is less likely than this.
    end_tokens: a draft ends with the first of them. shared_vocabulary: the ids from there on are
    unknown to one of the two models; those and the `forbidden` ones, which mean another text to
    the target, are never proposed.
    """

    name = "draft_model"

    def __init__(
        self,
        model: CachedModel,
        sampler: Sampler,
        *,
        uniform: Uniform | None = None,
        p_min: float = 0.0,
        end_tokens: Collection[TokenId] = (),
        shared_vocabulary: int | None = None,
        forbidden: Collection[TokenId] = (),
    ) -> None:
        self._model, self._sampler, self._uniform = model, sampler, uniform
        self._p_min, self._end_tokens = p_min, frozenset(end_tokens)
        self._shared_vocabulary = shared_vocabulary
        self._forbidden = np.array(sorted(forbidden), np.int32)
        self._silenced = ""

    def lag(self, committed: Sequence[TokenId]) -> int:
        """How many committed tokens its cache lacks, beyond the one that every draft evaluates."""
        shared = common_prefix_length(self._model.tokens, list(committed))
        return max(len(committed) - shared - 1, 0)

    def propose(
        self, committed: Sequence[TokenId], max_tokens: int, *, guide: Guide | None = None
    ) -> Draft:
        """Up to `max_tokens` tokens; none once the draft cannot hold or read the history."""
        history = list(committed)
        room = self._model.n_ctx - len(history) + 1
        if room < 1:
            return self._silence("its context is full")
        shared = self._align(history)
        known = self._shared_vocabulary
        if known is not None and max(history[shared:]) >= known:
            return self._silence("it lacks a token of the text")
        began = clock()
        [row] = self._model.extend(history[shared:], 1)
        read_seconds = clock() - began if len(history) - shared > 1 else 0.0
        tokens: list[TokenId] = []
        distributions: list[Distribution] = []
        confidences: list[float] = []
        num_drafted = 0
        for position in range(min(max_tokens, room)):
            if tokens:
                if guide is not None and not guide.go_on(position):
                    break
                [row] = self._model.extend(tokens[-1:], 1)
            num_drafted += 1
            choice = self._choose(row, look=guide is not None)
            if choice is None:
                break
            token, q, confidence = choice
            if guide is not None and not guide.take(position, confidence):
                break
            tokens.append(token)
            distributions.append(q)
            confidences.append(confidence)
            if token in self._end_tokens:
                break
        sampled = self._uniform is not None
        return Draft(
            tuple(tokens),
            tuple(distributions) if sampled else None,
            self.name,
            tuple(confidences) if guide is not None else None,
            read_seconds,
            num_drafted,
        )

    def _align(self, history: list[TokenId]) -> int:
        """Cut the cache to the prefix it shares with `history`; how long that is."""
        # At least the last token is to be evaluated, for its row.
        shared = min(common_prefix_length(self._model.tokens, history), len(history) - 1)
        self._model.truncate(shared)
        return shared

    def _choose(self, row: Row, look: bool) -> tuple[TokenId, Distribution, float] | None:
        """The next token, its q, and the largest probability; None to stop here.

        Whether to stop must not hang on the token that was drawn: dropping drawn tokens one does
        not like would change the distribution of what is verified.
        """
        if self._uniform is None and self._p_min <= 0 and not (look or self._restricted):
            token = self._sampler.best(row)
            return token, Distribution.point(token), 1.0
        q = self._allowed(self._sampler.distribution(row))
        if q is None:
            return None
        confidence = float(q.probabilities.max())
        if confidence < self._p_min:
            return None
        if self._uniform is None:
            best = int(q.ids[np.argmax(q.probabilities)])
            return best, Distribution.point(best), confidence
        return q.sample(self._uniform()), q, confidence

    @property
    def _restricted(self) -> bool:
        return self._shared_vocabulary is not None or bool(self._forbidden.size)

    def _allowed(self, q: Distribution) -> Distribution | None:
        """q without the ids that may not be proposed, renormalised; None if nothing is left."""
        if not self._restricted:
            return q
        kept = np.ones(len(q.ids), bool)
        if self._shared_vocabulary is not None:
            kept &= q.ids < self._shared_vocabulary
        if self._forbidden.size:
            kept &= ~np.isin(q.ids, self._forbidden)
        if kept.all():
            return q
        mass = q.probabilities[kept]
        return Distribution(q.ids[kept], mass / mass.sum()) if mass.sum() > 0 else None

    def _silence(self, reason: str) -> Draft:
        if reason != self._silenced:
            self._silenced = reason
            logger.warning("Going on without the draft model: %s.", reason)
        return NO_DRAFT

    def observe(self, finished: Round) -> None:
        """Keep the draft's sampler on the committed tokens."""
        for token in finished.tokens:
            self._sampler.accept(token)
