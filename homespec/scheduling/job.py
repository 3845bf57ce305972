"""A sequence to be generated: what is asked, how far it is, and its result."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from homespec.decoding.depth import FixedDepth
from homespec.decoding.logprobs import TokenLogprobs, token_logprobs
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.speculative import Proposal, SpeculativeDecoder
from homespec.decoding.stats import clock
from homespec.decoding.text import TextStream
from homespec.decoding.types import Row
from homespec.decoding.verify import RULES
from homespec.drafters.adaptive import RateTable
from homespec.drafters.answer_store import AnswerStore
from homespec.drafters.none import NoDrafter
from homespec.drafters.rated_lookup import RatedLookup
from homespec.errors import ContextFullError, HomespecError, UsageError
from homespec.generation import (
    ADAPTIVE_CEILING,
    MAX_DRAFT_DEPTH,
    Answer,
    Chunk,
    Closable,
    GenerateParams,
    Result,
)
from homespec.llama.model import Model
from homespec.llama.sampler import SamplerChain
from homespec.llama.sequences import CachedSequence
from homespec.llama.tokenizer import Tokenizer
from homespec.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Request:
    """What a sequence is to do.

    tokens: the prompt. sampling: with a seed, which alone gives the random stream: the text does
    not depend on what runs beside it (up to near-ties, docs/exactness.md). params: drafting is by
    lookup or none, and the rule is `match` unless asked otherwise. num_logprobs: of the best tokens
    told beside each one's own, None for none at all.
    """

    tokens: list[int]
    sampling: SamplingParams
    params: GenerateParams = field(default_factory=GenerateParams)
    num_logprobs: int | None = None


class Job:
    """A request on its way. `result` or `error` is set when it has ended.

    drafter: None where nothing may be drafted. alone: how it drafts while nothing else runs.
    """

    def __init__(
        self,
        request: Request,
        model: Model,
        tokenizer: Tokenizer,
        matches: RateTable | None,
        n_ctx: int,
        *,
        answers: AnswerStore | None = None,
    ) -> None:
        """Raises ContextFullError, and UsageError for what cannot be done.

        matches, answers: how often lookups are right, and what they look into besides its own text.
        """
        params, sampling = request.params, request.sampling
        if sampling.seed is None:
            raise UsageError("A sequence needs a seed.")
        _check_prompt(request.tokens, n_ctx, model.n_vocab)
        end_tokens = tokenizer.end_tokens
        if params.ignore_eos:
            banned = tuple((token, float("-inf")) for token in end_tokens)
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *banned))
            end_tokens = frozenset()
        self.request = request
        self.result: Result | None = None
        self.error: HomespecError | None = None
        self.placed = 0.0  # when it was begun, by the clock
        self.sequence: CachedSequence | None = None
        self.logprobs: list[TokenLogprobs] = []  # of all tokens, an end token too
        drafts = matches is not None and params.spec_type != "none"
        self.drafter = (
            RatedLookup(matches, answers=answers) if matches is not None and drafts else None
        )
        self.max_depth = ADAPTIVE_CEILING if params.draft_depth is None else params.draft_depth
        self.alone: Speculation | None = None
        self._chain = SamplerChain(model, sampling.within(n_ctx))
        self._rule = RULES["greedy" if sampling.greedy else params.rule or "match"]
        self._end_tokens = end_tokens
        self._text = TextStream(tokenizer.piece, params.stop)
        self._answer: Answer | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.result is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._answer.decoder.stats.num_tokens if self._answer else 0

    @property
    def decoder(self) -> SpeculativeDecoder:
        """Its decoder, once it was placed."""
        assert self._answer is not None
        return self._answer.decoder

    @property
    def committed(self) -> list[int]:
        """The final tokens, prompt included."""
        return self._answer.decoder.committed if self._answer else self.request.tokens

    @property
    def num_pending(self) -> int:
        """Committed tokens that the cache lacks; one of them, unless a prompt is being read."""
        return len(self.committed) - (len(self.sequence.tokens) if self.sequence else 0)

    def place(self, sequence: CachedSequence) -> None:
        """Give it a sequence of the cache; after `displace` its history is read anew."""
        self.sequence = sequence
        if self._answer is not None:
            self._answer.decoder.target = sequence
            return
        decoder = SpeculativeDecoder(
            target=sequence,
            drafter=self.drafter or NoDrafter(),
            sampler=self._chain,
            rule=self._rule,
            policy=FixedDepth(MAX_DRAFT_DEPTH),  # the scheduler chooses
            uniform=random.Random(self.request.sampling.seed).random,
            end_tokens=self._end_tokens,
            min_draft=self.request.params.min_draft,
        )
        self.placed = clock()
        self._answer = Answer(
            decoder,
            self.request.tokens,
            text=self._text,
            seed=self.request.sampling.seed or 0,
            explain=list,
            resources=self._resources,
        )
        decoder.begin(self.request.tokens, self.request.params.max_tokens)

    def displace(self) -> None:
        """Take its cells away."""
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None

    def advance(
        self, rows: list[Row], proposal: Proposal, cached: int, seconds: float
    ) -> list[Chunk]:
        """Commit what the pass gave; the text that came with it."""
        assert self._answer is not None
        decoder = self._answer.decoder
        finished = decoder.commit(proposal, rows, cached, seconds)
        decoder.note(finished)
        best = self.request.num_logprobs
        if best is not None:
            judged = zip(rows, finished.tokens, strict=False)  # the last rows may be cut off
            self.logprobs += [token_logprobs(row.logits, token, best) for row, token in judged]
        chunks = list(self._answer.push(finished))
        if decoder.finish_reason is not None:
            chunks += self._answer.rest()
            self.result = self._answer.finish()
        return chunks

    def fail(self, error: HomespecError) -> None:
        """End it with an error."""
        self.error = error
        for resource in self._resources:
            resource.close()

    @property
    def _resources(self) -> list[Closable]:
        return [self._chain, *(self.alone.resources if self.alone else [])]

    @property
    def drafts_alone(self) -> bool:
        """Whether its last draft was one of `propose_alone`, whose drafter learns by itself."""
        return self.alone is not None and self.decoder.drafter is self.alone.drafter

    def propose(self, depth: int) -> Proposal:
        """A draft of at most `depth` tokens, by lookup."""
        decoder = self.decoder
        decoder.drafter = self.drafter or NoDrafter()
        return decoder.propose(depth)

    def propose_alone(self) -> Proposal:
        """A draft as a sequence that has the model for itself makes it, draft model included."""
        if self.alone is None:
            raise AssertionError("no drafting alone")
        decoder = self.decoder
        decoder.drafter = self.alone.drafter
        return decoder.propose(min(decoder.max_draft, self.alone.policy.depth()))

    def without_draft(self) -> None:
        """Draft by lookup from now on."""
        if self.alone is not None:
            for resource in self.alone.resources:
                resource.close()
            self.alone = None

    def cancel(self) -> None:
        """End it here: the result is what came so far."""
        if self.done:
            return
        if self._answer is not None:
            self.result = self._answer.finish()
        else:
            self.fail(HomespecError("It was dropped before it began."))


def _check_prompt(tokens: list[int], n_ctx: int, n_vocab: int) -> None:
    if not tokens:
        raise UsageError("The prompt is empty.", hint="Give at least one token of text.")
    if len(tokens) > n_ctx:
        raise ContextFullError(
            f"The prompt has {len(tokens)} tokens, but the context holds {n_ctx}.",
            hint="Shorten the prompt or ask for a larger context with -c.",
        )
    if not (min(tokens) >= 0 and max(tokens) < n_vocab):
        raise UsageError(f"Token ids must lie between 0 and {n_vocab - 1}.")
