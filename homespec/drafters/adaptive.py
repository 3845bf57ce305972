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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from homespec.decoding.depth import FEW, Choice, LearnedCost, PassCost, Rate, best_depth
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
TAKEN_PRIOR = 0.9  # of the tokens that the draft model computes, those worth proposing
_MANY = 8  # tokens from which on reading them is a batch, and not as dear as drafting them
EXPLORATION = 1.0  # passes that may be lost at the very start where no profile tells their cost
PROBE_SHARE = 0.02
"""The share of the time that may be lost on trying again what did not pay."""

RISK = 2.0
"""How many times what it costs the draft's reading has to promise: texts are of many kinds."""

MOST_CREDIT = 8.0
"""Passes of time that the draft model may have gained, and lose again on texts that do not suit."""

CREDIT_KEPT = 0.8
"""Of what the draft model gained or lost, from one generation to the next."""

PATIENCE = 8.0
"""Passes of time saved up after which a miss is taken for half as likely as it seems."""

CURIOSITY = 0.5
"""How likely it is taken to be, at most, before passes over a few tokens were timed."""


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
        self.taken = Rate(TAKEN_PRIOR)
        self.rounds: dict[str, int] = {"none": 0, "ngram": 0, "draft_model": 0}
        self.num_drafted = 0
        self.model_credit = 0.0  # seconds that the draft model gained lately by the clock, or lost
        self._draft_prior, self._size_ratio = priors.draft_token_seconds, priors.size_ratio
        self._read_prior = priors.read_token_seconds
        self._prompt_token: float | None = None  # of the target
        self.exploration = 0.0 if priors.cost else EXPLORATION
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
        self.taken.fade()
        self.model_credit *= CREDIT_KEPT
        self.num_drafted = 0
        self.rounds = dict.fromkeys(self.rounds, 0)

    def draft_token(self, context: int) -> float:
        """Seconds of one token that the draft model computes."""
        if self._draft_seconds:
            return statistics.median(self._draft_seconds)
        return self._draft_prior or self._size_ratio * self.cost.seconds(1, context)

    def proposed_token(self, context: int) -> float:
        """Seconds of one that is proposed: those that were not worth it are paid for, too."""
        return self.draft_token(context) / self.taken.value

    def reading(self, lag: int, context: int) -> float:
        """Seconds of the draft to read `lag` tokens, to catch up."""
        token = self.draft_token(context)
        if lag < _MANY:
            return lag * token
        if self._read_seconds:
            return lag * statistics.median(self._read_seconds)
        if self._read_prior is not None:
            return lag * self._read_prior
        if self._prompt_token is not None:
            return lag * self._size_ratio * self._prompt_token
        return lag * READ_COST_PRIOR * token

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Note a pass of the target over prompt tokens."""
        if num_tokens >= _MANY:
            self._prompt_token = seconds / num_tokens

    @property
    def knows_draft(self) -> bool:
        """Whether a drafted token's seconds are known and not guessed."""
        return bool(self._draft_seconds) or self._draft_prior is not None

    def observe_draft(self, draft: Draft, lag: int, seconds: float) -> None:
        """Note what drafting took, after reading `lag` tokens more than one."""
        for position in range(draft.num_drafted):
            self.taken.observe(position < len(draft.tokens))
        passes = draft.num_drafted
        if lag:
            passes -= 1  # the first row came with the reading
        if lag >= _MANY:
            self._read_seconds.append(draft.read_seconds / (lag + 1))
        if passes > 0:
            self._draft_seconds.append((seconds - draft.read_seconds) / passes)


class RateTable:
    """A chance for each bucket of something: of match lengths, of confidences."""

    def __init__(self, priors: Mapping[float, float] | Mapping[int, float]) -> None:
        self._bounds = sorted(priors)
        self._rates = [Rate(prior) for _, prior in sorted(priors.items())]

    def __getitem__(self, value: float) -> Rate:
        return self._rates[max(bisect_right(self._bounds, value) - 1, 0)]

    def compare(
        self, length: int, foretold: Sequence[TokenId], committed: Sequence[TokenId]
    ) -> None:
        """Learn from what a match of `length` foretold, whether it was drafted or not.

        The first token that it had wrong says nothing of what lay beyond.
        """
        for place, (one, other) in enumerate(zip(foretold, committed, strict=False)):
            self[length + place].observe(one == other)
            if one != other:
                return

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
        self._begun = False
        self._lag = 0  # tokens the draft model has to read before it can draft
        self._generated = 0
        self._allowance = 0.0  # seconds that may be lost on probes
        self._probing = False
        self._lookup = NO_DRAFT  # of this round, drafted or not
        self._context = 0  # of the last pass

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """The draft with the best expected speed, of at most `max_tokens`; often none."""
        context = len(committed)
        if not self._begun:  # many may be made, and wait for their turn
            self.learned.begin()
            self._begun = True
        lookup = self._ngram.propose(committed, max_tokens) if self._ngram else NO_DRAFT
        self._lookup = lookup
        if self.learned.cost.wants_plain():
            return NO_DRAFT
        if self._model is None and not lookup.tokens:
            return NO_DRAFT  # most rounds: weighing nothing would take 5 % of a GPU's pass
        self._lag = self._model.lag(committed) if self._model else 0
        offers = {
            "ngram": self._offer_lookup(len(lookup.tokens), context),
            "draft_model": self._offer_model(max_tokens, context),
        }
        source = max(offers, key=lambda name: offers[name].rate)
        choice = offers[source]
        gain = choice.rate * self.learned.cost.seconds(1, context)
        if choice.depth and self.learned.cost.wants_plain(gain):
            return NO_DRAFT
        if choice.depth == 0:
            source = "ngram" if lookup.tokens else "draft_model"
            choice = self._probe(source, len(lookup.tokens) or max_tokens, context)
        if choice.depth == 0:
            return NO_DRAFT
        if source == "ngram":
            return Draft(lookup.tokens[: choice.depth], source="ngram")
        assert self._model is not None
        deepest = min(choice.depth + 2, max_tokens)
        guide = _Guide(self.learned, choice.rate, deepest, context)
        return self._model.propose(committed, deepest, guide=guide)

    def _offer_lookup(self, available: int, context: int) -> Choice:
        """Each accepted token makes the match one longer, and the next one likelier."""
        rates = self._match_rates(available)
        return best_depth(rates, lambda n: self.learned.cost.seconds(n, context), lambda _: 0.0)

    def _match_rates(self, available: int) -> Iterator[float]:
        length = self._ngram.match_length if self._ngram else 0
        return (self.learned.matches[length + i].value for i in range(available))

    def _cautious(self, max_tokens: int) -> int:
        """No deep drafts before it is known what they take."""
        return max_tokens if self.learned.knows_draft else min(max_tokens, FEW)

    def _offer_model(self, max_tokens: int, context: int) -> Choice:
        plain = Choice(0, 1.0, self.learned.cost.seconds(1, context))
        if self._model is None:
            return plain
        token = self.learned.proposed_token(context)
        choice = best_depth(
            [self.learned.model_rate.value] * self._cautious(max_tokens),
            lambda n: self.learned.cost.seconds(n, context),
            lambda k: k * token,
        )
        if choice.depth == 0:
            return plain
        # Catching up is an investment in the tokens to come: as many, by Lindy's rule, as have
        # come already. So a short answer never pays for reading a long prompt twice.
        coming = max(self._generated, EXPECTED_TOKENS)
        saved = (1 / plain.rate - 1 / choice.rate) * coming
        reading = self.learned.reading(self._lag, context)
        if self._lag >= _MANY and self.learned.model_credit < -plain.seconds:
            return plain  # the last investments were lost: only a trial may show that this pays
        return choice if RISK * reading <= saved + token else plain

    def _probe(self, source: str, available: int, context: int) -> Choice:
        """Try again what did not pay, if it may, once the time is saved up that this will cost.

        It may pay where its tokens could be surer than they seem: by more, the more was saved up.
        """
        learned = self.learned
        plain = Choice(0, 1.0, learned.cost.seconds(1, context))
        if learned.exploration and plain.seconds < math.inf:
            self._allowance += learned.exploration * plain.seconds
            learned.exploration = 0.0
        available = min(available, learned.cost.deepest_trial)
        if source == "ngram":
            rates, token, reading = self._match_rates(available), 0.0, 0.0
        else:
            rates = iter([learned.model_rate.value] * self._cautious(available))
            token = learned.proposed_token(context)
            reading = learned.reading(self._lag, context)
        doubt = 1 / (1 + self._allowance / (PATIENCE * plain.seconds))
        if learned.cost.deepest_trial <= FEW:
            doubt = min(doubt, CURIOSITY)
        trial, tokens, reach, hope, hopeful = plain, 1.0, 1.0, 1.0, 1.0
        for depth, rate in enumerate(rates, start=1):
            reach, hopeful = reach * rate, hopeful * (1 - doubt * (1 - rate))
            tokens, hope = tokens + reach, hope + hopeful
            seconds = learned.cost.seconds(depth + 1, context) + depth * token
            loss = seconds + reading - tokens * plain.seconds
            if not loss <= self._allowance:  # before the first pass it is nan, and no probe either
                break
            if hope > plain.rate * seconds:
                trial = Choice(depth, tokens, seconds + reading)
        self._probing = trial.depth > 0
        return trial

    def observe(self, finished: Round) -> None:
        """Learn from a round: what it took, and what of its draft and of the lookup was right."""
        for drafter in (self._ngram, self._model):
            if drafter is not None:
                drafter.observe(finished)
        self._generated += len(finished.tokens)
        self._context = finished.context_length
        draft, learned = finished.draft, self.learned
        if finished.num_evaluated != 1 + len(draft.tokens):
            learned.observe_prompt(finished.num_evaluated, finished.verify_seconds)
            return
        learned.cost.observe(
            finished.num_evaluated, finished.context_length, finished.verify_seconds
        )
        learned.rounds[draft.source if draft.tokens else "none"] += 1
        learned.num_drafted += len(draft.tokens)
        self._settle(finished)
        if draft.source == "draft_model":
            learned.observe_draft(draft, self._lag, finished.draft_seconds)
            for i in range(min(finished.num_accepted + 1, len(draft.tokens))):
                self._judged(draft, i, i < finished.num_accepted)
        if self._ngram is not None:
            length = self._ngram.match_length
            learned.matches.compare(length, self._lookup.tokens, finished.tokens)
        self._lookup = NO_DRAFT

    def _settle(self, finished: Round) -> None:
        """Save up for probes, and take off what the last one lost in truth."""
        seconds = finished.verify_seconds + finished.draft_seconds
        self._allowance += PROBE_SHARE * seconds
        plain = self.learned.cost.seconds(1, finished.context_length)
        gained = len(finished.tokens) * plain - seconds
        if self._probing:
            self._allowance -= max(-gained, 0.0)
        self._probing = False
        if finished.draft.num_drafted:
            most = MOST_CREDIT * plain
            self.learned.model_credit = min(self.learned.model_credit + gained, most)

    def _judged(self, draft: Draft, position: int, accepted: bool) -> None:
        self.learned.model_rate.observe(accepted)
        if draft.confidences:
            self.learned.confidences[draft.confidences[position]].observe(accepted)

    def explain(self) -> list[str]:
        """A few lines: what was chosen, and what the choice rested on."""
        learned = self.learned
        total = sum(learned.rounds.values()) if self._begun else 0
        if not total:
            return ["Nothing was decoded beyond the first token."]
        context = self._context
        plain = learned.cost.seconds(1, context)
        shares = ", ".join(f"{name} {n / total:.0%}" for name, n in learned.rounds.items() if n)
        widths = ", ".join(
            f"{n} x{learned.cost.seconds(n, context) / plain:.2f}" for n in (2, 4, 8, 16)
        )
        drafted = total - learned.rounds["none"]
        depth = f", {learned.num_drafted / drafted:.1f} tokens deep" if drafted else ""
        lines = [
            f"Rounds: {shares}{depth}.",
            f"A target pass over one token takes {plain * 1e3:.1f} ms; over more: {widths}.",
        ]
        if self._ngram is not None:
            lines.append(f"Lookups are accepted, by length of the match: {learned.matches}.")
        if self._model is not None:
            lines.append(
                f"The draft model is accepted {learned.model_rate.value:.0%} of the time; "
                f"a drafted token takes {learned.draft_token(context) / plain:.2f} of a "
                "target pass."
            )
        return lines


class _Guide:
    """Ends a draft where going on is not worth what it adds to the round.

    goal: tokens a second that the round is to reach. deepest: tokens it may hold.
    """

    def __init__(self, learned: Learned, goal: float, deepest: int, context: int) -> None:
        self._learned, self._goal = learned, goal
        self._deepest, self._context = deepest, context
        self._token, self._rate = learned.proposed_token(context), learned.model_rate.value
        self._reach = 1.0  # chance that all tokens so far are accepted

    def take(self, position: int, confidence: float) -> bool:
        """Whether to propose the token at hand; it is drafted already, so only its pass counts."""
        reach = self._reach * self._learned.confidences[confidence].value
        if not self._pays(position, reach, 0.0):
            return False
        self._reach = reach
        return True

    def go_on(self, position: int) -> bool:
        """Whether to draft the token at `position` at all."""
        return self._pays(position, self._reach * self._rate, self._token)

    def _pays(self, position: int, reach: float, seconds: float) -> bool:
        """Whether the token at `position` pays, or a longer piece that begins with it.

        A pass may cost much more with the first token of a piece, and little more with the next.
        reach: chance that it is accepted with all before it. seconds: what drafting it takes.
        """
        cost, tokens = self._learned.cost, 0.0
        without = cost.seconds(position + 1, self._context)
        for last in range(position, self._deepest):
            tokens += reach
            added = seconds + cost.seconds(last + 2, self._context) - without
            if tokens >= self._goal * added:
                return True
            reach *= self._rate
            seconds += self._token
        return False
