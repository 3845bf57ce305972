"""Chooses each round what to draft with, and how deep: n-gram lookup, the draft model, or nothing.

The choice is the one with the most expected tokens per second (`homespec.decoding.depth`). What it
rests on is learned while decoding: how often a token was accepted, by match length for the lookup
and by the draft's own confidence for the model; what a pass of each width takes; what a drafted
token takes. It looks at committed tokens and clocks, never at a token that was drawn before
deciding whether to propose it, so verification stays exact.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homespec.decoding.depth import Choice, LearnedCost, PassCost, Rate, best_depth
from homespec.decoding.types import NO_DRAFT, Draft, Round, TokenId
from homespec.drafters.draft_model import DraftModelDrafter
from homespec.drafters.ngram import NgramDrafter

MATCH_PRIORS = {2: 0.30, 3: 0.42, 4: 0.52, 6: 0.66, 9: 0.78, 14: 0.86, 22: 0.92}
"""Length of a match -> chance that it goes on for a token more, before anything is seen."""

CONFIDENCE_PRIORS = {0.0: 0.2, 0.3: 0.38, 0.5: 0.55, 0.7: 0.72, 0.85: 0.85, 0.95: 0.95}
"""Least probability of the draft's token -> chance that the target accepts it."""

MODEL_PRIOR = 0.7
READ_COST_PRIOR = 0.33  # of a pass of one token, for a token that is only read
EXPECTED_TOKENS = 32  # of an answer, before it has shown how long it is
EXPLORATION = 1.0  # passes that may be lost at the very start, to learn what a pass costs
PROBE_SHARE = 0.02
"""The share of the time that may be lost on trying again what did not pay."""


@dataclass(frozen=True, slots=True)
class Priors:
    """What is known before the first round: from a profile, or None for a guess.

    cost: the target's cost curve. draft_token_seconds: one drafted token. read_token_seconds: one
    that the draft reads among many. size_ratio: bytes of the
    draft's weights to the target's, from which a guess is made. model_rate: chance that a drafted
    token is accepted; sampled_rate: where the draft is sampled; match_rates: for lookups, by
    match length.
    """

    cost: PassCost | None = None
    draft_token_seconds: float | None = None
    read_token_seconds: float | None = None
    size_ratio: float = 0.4
    model_rate: float = MODEL_PRIOR
    sampled_rate: float = MODEL_PRIOR
    match_rates: Mapping[int, float] = field(default_factory=lambda: MATCH_PRIORS)


class Learned:
    """What the rounds have taught; lives as long as the engine, over many generations."""

    def __init__(self, priors: Priors | None = None) -> None:
        priors = priors or Priors()
        self.cost = LearnedCost(priors.cost)
        self.matches = RateTable(priors.match_rates)
        self.confidences = RateTable(CONFIDENCE_PRIORS)
        self.model_rate = Rate(priors.model_rate)
        self.rounds: dict[str, int] = {"none": 0, "ngram": 0, "draft_model": 0}
        self._draft_prior, self._size_ratio = priors.draft_token_seconds, priors.size_ratio
        self._read_prior = priors.read_token_seconds
        self._prompt_token: float | None = None  # of the target
        self.exploration = EXPLORATION
        self._draft_seconds: deque[float] = deque(maxlen=9)
        self._read_seconds: deque[float] = deque(maxlen=5)
        self._model_rates = {False: self.model_rate, True: Rate(priors.sampled_rate)}

    def draft_is(self, *, sampled: bool) -> None:
        """Have `model_rate` be that of sampled drafts, or of greedy ones."""
        self.model_rate = self._model_rates[sampled]

    def begin(self) -> None:
        """A new generation: what was accepted in the last one counts less."""
        self.matches.fade()
        self.confidences.fade()
        self.model_rate.fade()
        self.rounds = dict.fromkeys(self.rounds, 0)

    def draft_token(self, context: int) -> float:
        """Seconds of one drafted token."""
        if self._draft_seconds:
            return statistics.median(self._draft_seconds)
        return self._draft_prior or self._size_ratio * self.cost.seconds(1, context)

    def read_token(self, context: int) -> float:
        """Seconds of a token that the draft reads in a batch, to catch up."""
        if self._read_seconds:
            return statistics.median(self._read_seconds)
        if self._read_prior is not None:
            return self._read_prior
        if self._prompt_token is not None:
            return self._size_ratio * self._prompt_token
        return READ_COST_PRIOR * self.draft_token(context)

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Note a pass of the target over prompt tokens."""
        if num_tokens >= 8:
            self._prompt_token = seconds / num_tokens

    @property
    def knows_draft(self) -> bool:
        """Whether a drafted token's seconds are known and not guessed."""
        return bool(self._draft_seconds) or self._draft_prior is not None

    def observe_draft(self, num_tokens: int, lag: int, seconds: float, reading: float) -> None:
        """Note what drafting took: in all, and of that, reading `lag` tokens more than one."""
        if lag:
            self._read_seconds.append(reading / (lag + 1))
            num_tokens -= 1  # its row came with the reading
        if num_tokens:
            self._draft_seconds.append((seconds - reading) / num_tokens)


class RateTable:
    """A chance for each bucket of something: of match lengths, of confidences."""

    def __init__(self, priors: Mapping[float, float] | Mapping[int, float]) -> None:
        self._bounds = sorted(priors)
        self._rates = [Rate(prior) for _, prior in sorted(priors.items())]

    def __getitem__(self, value: float) -> Rate:
        return self._rates[max(bisect_right(self._bounds, value) - 1, 0)]

    def fade(self) -> None:
        """Let what was seen count less."""
        for rate in self._rates:
            rate.fade()

    def __str__(self) -> str:
        return ", ".join(
            f"{bound}+ {rate.value:.0%}"
            for bound, rate in zip(self._bounds, self._rates, strict=True)
        )


class AdaptiveDrafter:
    """Lets lookup and draft model compete; drafts nothing where neither pays."""

    name = "adaptive"

    def __init__(
        self,
        ngram: NgramDrafter | None,
        model: DraftModelDrafter | None = None,
        learned: Learned | None = None,
    ) -> None:
        self._ngram, self._model = ngram, model
        self.learned = learned or Learned()
        self.learned.begin()
        self._lag = 0  # tokens the draft model has to read before it can draft
        self._generated = 0
        self._allowance = 0.0  # seconds that may be lost on probes
        self._probing = False

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """The draft with the best expected speed, of at most `max_tokens`; often none."""
        context = len(committed)
        lookup = self._ngram.propose(committed, max_tokens) if self._ngram else NO_DRAFT
        if self._model is None and not lookup.tokens:
            return NO_DRAFT  # most rounds: weighing nothing would take 5 % of a GPU's pass
        self._lag = self._model.lag(committed) if self._model else 0
        offers = {
            "ngram": self._offer_lookup(len(lookup.tokens), context),
            "draft_model": self._offer_model(max_tokens, context),
        }
        source = max(offers, key=lambda name: offers[name].rate)
        choice = offers[source]
        if choice.depth == 0:
            source = "ngram" if lookup.tokens else "draft_model"
            choice = self._probe(source, len(lookup.tokens), context)
        if choice.depth == 0:
            return NO_DRAFT
        if source == "ngram":
            return Draft(lookup.tokens[: choice.depth], source="ngram")
        assert self._model is not None
        guide = _Guide(self.learned, choice, context)
        return self._model.propose(committed, min(choice.depth + 2, max_tokens), guide=guide)

    def _offer_lookup(self, available: int, context: int) -> Choice:
        """Each accepted token makes the match one longer, and the next one likelier."""
        length = self._ngram.match_length if self._ngram else 0
        rates = (self.learned.matches[length + i].value for i in range(available))
        return best_depth(rates, lambda n: self.learned.cost.seconds(n, context), lambda _: 0.0)

    def _offer_model(self, max_tokens: int, context: int) -> Choice:
        plain = Choice(0, 1.0, self.learned.cost.seconds(1, context))
        if self._model is None:
            return plain
        token = self.learned.draft_token(context)
        cautious = max_tokens if self.learned.knows_draft else min(max_tokens, 2)
        choice = best_depth(
            [self.learned.model_rate.value] * cautious,
            lambda n: self.learned.cost.seconds(n, context),
            lambda k: k * token,
        )
        if choice.depth == 0:
            return plain
        # Catching up is an investment in the tokens to come: as many, by Lindy's rule, as have
        # come already. So a short answer never pays for reading a long prompt twice.
        coming = max(self._generated, EXPECTED_TOKENS)
        saved = (1 / plain.rate - 1 / choice.rate) * coming
        reading = self._lag * self.learned.read_token(context)
        return choice if reading <= saved + token else plain

    def _probe(self, source: str, available: int, context: int) -> Choice:
        """Try again what did not pay, once the time is saved up that it is likely to cost."""
        learned = self.learned
        plain = Choice(0, 1.0, learned.cost.seconds(1, context))
        if learned.exploration and plain.seconds < math.inf:
            self._allowance += learned.exploration * plain.seconds
            learned.exploration = 0.0
        depth, seconds = 1, 0.0
        if source == "ngram":
            depth = min(2, available)
            length = self._ngram.match_length if self._ngram else 0
            rate = learned.matches[length].value
        elif self._model is not None:
            seconds = learned.draft_token(context) + self._lag * learned.read_token(context)
            rate = learned.model_rate.value
        else:
            return plain
        trial = Choice(depth, 1 + rate, seconds + learned.cost.seconds(depth + 1, context))
        loss = trial.seconds - trial.tokens * plain.seconds
        if not loss <= self._allowance:  # before the first pass it is nan, and no probe either
            return plain
        self._probing = True
        return trial

    def observe(self, finished: Round) -> None:
        """Learn from a round; one that was cut by its depth says nothing of what lay beyond."""
        for drafter in (self._ngram, self._model):
            if drafter is not None:
                drafter.observe(finished)
        self._generated += len(finished.tokens)
        draft, learned = finished.draft, self.learned
        if finished.num_evaluated != 1 + len(draft.tokens):
            learned.observe_prompt(finished.num_evaluated, finished.verify_seconds)
            return
        learned.cost.observe(
            finished.num_evaluated, finished.context_length, finished.verify_seconds
        )
        learned.rounds[draft.source] += 1
        self._settle(finished)
        if draft.source == "draft_model":
            learned.observe_draft(
                len(draft.tokens), self._lag, finished.draft_seconds, draft.read_seconds
            )
        for i in range(min(finished.num_accepted + 1, len(draft.tokens))):
            self._judged(draft, i, i < finished.num_accepted)

    def _settle(self, finished: Round) -> None:
        """Save up for probes, and take off what the last one lost in truth."""
        seconds = finished.verify_seconds + finished.draft_seconds
        self._allowance += PROBE_SHARE * seconds
        if self._probing:
            plain = self.learned.cost.seconds(1, finished.context_length)
            self._allowance -= max(seconds - len(finished.tokens) * plain, 0.0)
        self._probing = False

    def _judged(self, draft: Draft, position: int, accepted: bool) -> None:
        if draft.source == "ngram":
            assert self._ngram is not None
            self.learned.matches[self._ngram.match_length + position].observe(accepted)
        else:
            self.learned.model_rate.observe(accepted)
            if draft.confidences:
                self.learned.confidences[draft.confidences[position]].observe(accepted)

    def explain(self) -> list[str]:
        """A few lines: what was chosen, and what the choice rested on."""
        learned = self.learned
        total = sum(learned.rounds.values())
        if not total:
            return ["Nothing was decoded beyond the first token."]
        plain = learned.cost.seconds(1, 0)
        shares = ", ".join(f"{name} {n / total:.0%}" for name, n in learned.rounds.items() if n)
        widths = ", ".join(f"{n} x{learned.cost.seconds(n, 0) / plain:.2f}" for n in (2, 4, 8, 16))
        lines = [
            f"Rounds: {shares}.",
            f"A target pass over one token takes {plain * 1e3:.1f} ms; over more: {widths}.",
        ]
        if self._ngram is not None:
            lines.append(f"Lookups are accepted, by length of the match: {learned.matches}.")
        if self._model is not None:
            lines.append(
                f"The draft model is accepted {learned.model_rate.value:.0%} of the time; "
                f"a drafted token takes {learned.draft_token(0) / plain:.2f} of a target pass."
            )
        return lines


class _Guide:
    """Ends a draft where the next token is not worth what it adds to the round."""

    def __init__(self, learned: Learned, choice: Choice, context: int) -> None:
        self._learned, self._goal, self._context = learned, choice.rate, context
        self._reach = 1.0  # chance that all tokens so far are accepted

    def take(self, position: int, confidence: float) -> bool:
        """Whether to propose the token at hand; it is drafted already, so only its pass counts."""
        reach = self._reach * self._learned.confidences[confidence].value
        if reach < self._goal * self._added(position):
            return False
        self._reach = reach
        return True

    def go_on(self, position: int) -> bool:
        """Whether to draft the token at `position` at all."""
        reach = self._reach * self._learned.model_rate.value
        seconds = self._added(position) + self._learned.draft_token(self._context)
        return reach >= self._goal * seconds

    def _added(self, position: int) -> float:
        cost = self._learned.cost
        return cost.seconds(position + 2, self._context) - cost.seconds(position + 1, self._context)
