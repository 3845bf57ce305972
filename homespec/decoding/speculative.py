"""Speculative decoding: one round, and the loop. Plain decoding is a round with an empty draft.

The cache contract
------------------
*Committed* tokens are final. Between rounds the target's cache holds all of them but the last, the
*pending* one (before the first round: all but the prompt's last chunk). A round

1. drafts: `draft = drafter.propose(committed, depth)`, the depth cut to budget and context
2. verifies: `rows = target.extend(pending + draft)`; row i judges `draft[i]`, the last row gives
   the bonus token
3. accepts: an acceptance rule keeps a prefix of the draft, then adds one token of the target's own
4. commits those tokens
5. rolls back: `target.truncate(len(committed) - 1)`, absolute

The drafter brings its own cache into line with `committed` when it is asked again, so a draft
that was accepted whole is no special case. A round either commits or, on an exception (Ctrl-C is
one), leaves the target's cache as it found it.

`propose` is step 1 and `commit` steps 3 to 5. Between them stands the pass: `round` makes it for
one sequence, the scheduler (homespec.scheduling) for many at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from homespec.decoding.stats import GenerationStats, clock
from homespec.decoding.types import (
    NO_DRAFT,
    CachedModel,
    DepthPolicy,
    Draft,
    Drafter,
    FinishReason,
    Round,
    Row,
    Sampler,
    TokenId,
)
from homespec.decoding.verify import AcceptanceRule, Uniform
from homespec.errors import ContextFullError, UsageError


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a verifying pass is to evaluate for a sequence: pending tokens, then their draft."""

    pending: list[TokenId]
    draft: Draft
    draft_seconds: float

    @property
    def tokens(self) -> list[TokenId]:
        """All of them."""
        return [*self.pending, *self.draft.tokens]

    @property
    def num_rows(self) -> int:
        """Rows that `commit` needs of the pass."""
        return len(self.draft.tokens) + 1


@dataclass(slots=True)
class SpeculativeDecoder:
    """One sequence being decoded.

    min_draft: shorter drafts are not worth a wide pass, and are dropped. A sampled draft never is:
    choosing among drawn tokens would change the distribution of what is verified.
    committed: the final tokens, prompt included; `finish_reason` is set when the loop ends.
    """

    target: CachedModel
    drafter: Drafter
    sampler: Sampler
    rule: AcceptanceRule
    policy: DepthPolicy
    uniform: Uniform
    end_tokens: frozenset[TokenId]
    min_draft: int = 0
    committed: list[TokenId] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)
    finish_reason: FinishReason | None = None
    _started: float = field(default=0.0, init=False)
    _budget: int = field(default=0, init=False)

    def generate(
        self, prompt: list[TokenId], max_tokens: int | None = None, batch_size: int = 512
    ) -> Iterator[Round]:
        """Yield rounds until an end token, the budget, or a full context.

        max_tokens: budget of new tokens (>= 1), None for as many as the context holds.
        batch_size: prompt tokens per pass. Raises ContextFullError when the prompt does not fit.
        """
        self.begin(prompt, max_tokens)
        self._prefill(batch_size)
        while self.finish_reason is None:
            finished = self.round(self.max_draft)
            self.note(finished)
            yield finished
            self.stats.total_seconds = clock() - self._started

    def begin(self, prompt: list[TokenId], max_tokens: int | None = None) -> None:
        """Take up a prompt; what the target's cache already holds of it stays."""
        self._check_prompt(prompt, max_tokens)
        self._started = clock()
        reused = min(common_prefix_length(self.target.tokens, prompt), len(prompt) - 1)
        self.target.truncate(reused)
        self.committed = list(prompt)
        self.stats.num_prompt_tokens, self.stats.num_cached_tokens = len(prompt), reused
        # Token n_ctx + 1 can still be drawn: it is never evaluated.
        budget = self.target.n_ctx + 1 - len(prompt)
        self._budget = budget if max_tokens is None else min(budget, max_tokens)
        self.sampler.prime(prompt)

    @property
    def max_draft(self) -> int:
        """The most tokens that the next round may draft; the first token is not kept waiting."""
        return self._budget - self.stats.num_tokens - 1 if self.stats.num_tokens else 0

    def note(self, finished: Round) -> None:
        """Count a round, and set `finish_reason` where it was the last one."""
        stats, elapsed = self.stats, clock() - self._started
        if stats.num_tokens == 0:
            stats.record_first(finished, elapsed)
        else:
            stats.record(finished)
        stats.total_seconds = elapsed
        if finished.tokens[-1] in self.end_tokens:
            self.finish_reason = FinishReason.STOP
        elif stats.num_tokens >= self._budget:
            self.finish_reason = FinishReason.LENGTH

    def _check_prompt(self, prompt: list[TokenId], max_tokens: int | None) -> None:
        if not prompt:
            raise UsageError("The prompt is empty.", hint="Give at least one token of text.")
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}, but must be at least 1.")
        if len(prompt) > self.target.n_ctx:
            raise ContextFullError(
                f"The prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}.",
                hint="Shorten the prompt or ask for a larger context with -c.",
            )

    def _prefill(self, batch_size: int) -> None:
        """Read the prompt but for its last chunk: round one takes that."""
        began = clock()
        prompt, reused = self.committed, len(self.target.tokens)
        for start in range(reused, len(prompt) - batch_size, batch_size):
            self.target.extend(prompt[start : start + batch_size], num_rows=0)
        self.stats.prompt_seconds = clock() - began

    def round(self, max_draft: int) -> Round:
        """Draft, verify, commit, roll back. max_draft: the most tokens that may be drafted."""
        cached = len(self.target.tokens)
        proposal = self.propose(max_draft)
        began = clock()
        rows = self.target.extend(proposal.tokens, proposal.num_rows)
        return self.commit(proposal, rows, cached, clock() - began)

    def propose(self, max_draft: int) -> Proposal:
        """Draft at most `max_draft` tokens."""
        began = clock()
        pending = self.committed[len(self.target.tokens) :]
        draft = self._draft(min(max_draft, self.target.n_ctx - len(self.committed)))
        return Proposal(pending, draft, clock() - began)

    def commit(
        self, proposal: Proposal, rows: Sequence[Row], cached: int, verify_seconds: float
    ) -> Round:
        """Accept what the rows of the pass confirm, commit it, and roll the cache back.

        cached: tokens in the target's cache before the pass; verify_seconds: what the pass took.
        """
        began, draft = clock(), proposal.draft
        try:
            acceptance = self.rule(draft, rows, self.sampler, self.uniform, self.end_tokens)
        except BaseException:
            self.target.truncate(cached)
            raise
        self.committed.extend(acceptance.tokens)
        self.target.truncate(min(len(self.committed) - 1, len(self.target.tokens)))
        finished = Round(
            draft=draft,
            tokens=acceptance.tokens,
            num_accepted=acceptance.num_accepted,
            context_length=cached,
            num_evaluated=len(proposal.pending) + len(draft.tokens),
            draft_seconds=proposal.draft_seconds,
            verify_seconds=verify_seconds,
            sample_seconds=clock() - began,
        )
        self.drafter.observe(finished)
        self.policy.observe(finished)
        return finished

    def _draft(self, max_draft: int) -> Draft:
        depth = min(self.policy.depth(), max_draft) if max_draft > 0 else 0
        if depth < 1:
            return NO_DRAFT
        draft = self.drafter.propose(self.committed, depth)
        if len(draft.tokens) > depth:
            raise AssertionError(f"{self.drafter.name} drafted more than {depth} tokens")
        dropped = len(draft.tokens) < self.min_draft and draft.distributions is None
        return NO_DRAFT if dropped else draft


def common_prefix_length(left: list[TokenId], right: list[TokenId]) -> int:
    """How many leading tokens two lists share; slices are compared, not tokens one by one."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:  # left[:low] is shared, left[:high + 1] is not
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
