"""Continuous batching: `step` is one pass of the target over tokens of all running sequences.

Between steps a running sequence's cache holds all its committed tokens but the pending ones, as the
cache contract of homespec.decoding.speculative has it: one pending token where it is being written,
many where its prompt is still to be read. So reading a prompt in pieces, giving up the cells of a
sequence and taking it up again need no states of their own. A step

1. places waiting jobs on free sequences
2. has each job that is being written look up a draft, in its own text and, in a batch, in answers
   that have ended, and shares the width of the pass among the drafts: the tokens likeliest to be
   accepted first, as many as the cost of a pass makes worthwhile
3. adds pieces of prompts, up to `prompt_chunk` tokens; what another sequence holds of a prompt is
   taken up, not read
4. makes one pass, and has each job's decoder accept, commit and roll back

Which sequences shared a pass decides nothing but time: acceptance looks at a sequence's own rows,
with its own random stream.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from homespec.decoding.depth import best_depths
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.speculative import Proposal
from homespec.decoding.stats import clock
from homespec.drafters.adaptive import Learned
from homespec.drafters.answer_store import AnswerStore
from homespec.errors import CannotRunError, HomespecError, UsageError
from homespec.generation import WITHOUT_DRAFT_MODEL, Chunk, GenerateParams
from homespec.llama.context import LogitsRow
from homespec.llama.sequences import Block, CachedSequence, SequenceCache, num_held
from homespec.llama.tokenizer import Tokenizer
from homespec.scheduling.job import Job, Request
from homespec.scheduling.prefixes import WORTHWHILE, KeptSequences, coming_prefix, longest_prefix
from homespec.scheduling.stats import SchedulerStats
from homespec.speculation import Speculation

logger = logging.getLogger(__name__)

_HEADROOM = 32  # free cells for each running sequence before another one is placed


@dataclass(frozen=True, slots=True)
class ScheduleParams:
    """parallel: sequences that run at once. n_ctx: tokens of one, prompt and answer.

    prompt_chunk: prompt tokens of a pass; small ones keep running answers flowing, large ones
    read faster. keep: ended sequences whose cells are kept for prompts that begin alike.
    shared_tokens: of ended answers, in which the lookups of others look, too; 0 for requests of
    people who may not read each other's.
    """

    parallel: int
    n_ctx: int = 4096
    prompt_chunk: int = 512
    keep: int = 2
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for a job: text, and perhaps its end (`job.result` or `job.error`)."""

    job: Job
    chunks: list[Chunk]


@dataclass(slots=True)
class _Share:
    """A job's part of a pass; without a proposal it is a piece of its prompt."""

    job: Job
    tokens: list[int]
    proposal: Proposal | None
    cached: int

    @property
    def sequence(self) -> CachedSequence:
        assert self.job.sequence is not None  # running jobs have one
        return self.job.sequence

    @property
    def num_rows(self) -> int:
        return self.proposal.num_rows if self.proposal else 0


Alone = Callable[[GenerateParams, SamplingParams], Speculation]
"""Makes the drafting of a job that has the model for itself."""


class Scheduler:
    """Runs jobs over a cache; not to be used by two threads at once.

    learned: what passes cost and how often lookups are right, for all jobs together. alone: where
    a draft model is loaded, it drafts for a job while no other runs or waits.
    """

    def __init__(
        self,
        cache: SequenceCache,
        tokenizer: Tokenizer,
        learned: Learned,
        params: ScheduleParams,
        alone: Alone | None = None,
    ) -> None:
        self.params = params
        self.stats = SchedulerStats()
        self._cache, self._tokenizer, self._learned = cache, tokenizer, learned
        self._alone = alone if cache.can_truncate else None
        self._n_ctx = min(params.n_ctx, cache.num_cells)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        # What cannot be cut cannot be shared either: a recurrent state stands for all its tokens.
        self._kept = KeptSequences(params.keep if cache.can_truncate else 0)
        self._answers = AnswerStore(params.shared_tokens) if params.shared_tokens else None

    @property
    def num_running(self) -> int:
        """Jobs on sequences."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for one."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    def submit(self, request: Request) -> Job:
        """Take up a request; it begins with a step to come.

        Raises ContextFullError and UsageError for one that cannot be served.
        """
        params, sampling = request.params, request.sampling
        if params.spec_type == "draft_model" and self._alone is None:
            raise UsageError(
                "No draft model is loaded for sequences that run together.",
                hint="Take --spec-type ngram or none.",
            )
        matches = self._learned.matches if self._cache.can_truncate else None
        job = Job(
            request, self._cache.model, self._tokenizer, matches, self._n_ctx, answers=self._answers
        )
        if self._alone is not None and params.spec_type not in WITHOUT_DRAFT_MODEL:
            job.alone = self._alone(params, sampling)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job here; its sequence is free at once."""
        if job in self._waiting:
            self._waiting.remove(job)
        job.cancel()
        self._leave(job)

    def step(self) -> list[Progress]:
        """One pass. Returns what it gave, by job; [] where only prompts were read.

        On an exception (Ctrl-C in a pass is one) the caches are as they were before the step.
        """
        self._place()
        written = self._written()
        taken = sum(len(share.tokens) for share in written)
        shares = self._with_room(written + self._read(self._cache.n_batch - taken))
        if not shares:
            return []
        blocks = [Block(share.sequence, share.tokens, share.num_rows) for share in shares]
        began = clock()
        rows = self._cache.extend(blocks)
        seconds = clock() - began
        self._learn(shares, seconds)
        progress = []
        for share, own in zip(shares, rows, strict=True):
            if share.proposal is None:
                share.job.decoder.stats.prompt_seconds += seconds
            else:
                progress.append(self._advance(share, own, seconds))
        self.stats.sample_seconds += clock() - began - seconds
        return progress

    def _advance(self, share: _Share, rows: list[LogitsRow], seconds: float) -> Progress:
        job = share.job
        chunks: list[Chunk] = []
        assert share.proposal is not None
        try:
            chunks = job.advance(rows, share.proposal, share.cached, seconds)
        except HomespecError as exc:  # this row's own failure: the others go on
            job.fail(exc)
        except Exception as exc:  # and so is a fault of ours
            logger.warning("An answer failed.", exc_info=exc)
            job.fail(CannotRunError(f"The answer failed: {type(exc).__name__}."))
        if job.result is not None and self._answers is not None:
            self._answers.add(job.result.tokens)
        if job.done:
            self._leave(job)
        return Progress(job, chunks)

    def _leave(self, job: Job) -> None:
        if job in self._running:
            self._running.remove(job)
        if job.sequence is None:
            return
        if job.result is not None and self._kept.capacity:
            self._kept.keep(job.sequence)
            job.sequence = None
        else:
            job.displace()

    def _place(self) -> None:
        """Give free sequences to waiting jobs, while there are cells to read their prompts into."""
        while self._waiting and len(self._running) < self.params.parallel:
            job = self._waiting[0]
            promised = sum(one.num_pending + _HEADROOM for one in self._running)
            free = self._cache.num_free + self._kept.num_tokens - promised
            if self._running and free < len(job.committed) + _HEADROOM:
                return
            job.place(self._cache.open(self._n_ctx))
            self._running.append(self._waiting.popleft())

    def _written(self) -> list[_Share]:
        """The jobs past their prompts: the pending token, and what of a draft is worthwhile."""
        jobs = [job for job in self._running if job.num_pending == 1]
        if len(jobs) == 1 and len(self._running) == 1 and not self._waiting and jobs[0].alone:
            proposals = [jobs[0].propose_alone()]
        else:
            depths = self._depths(jobs)
            proposals = [job.propose(depth) for job, depth in zip(jobs, depths, strict=True)]
        return [
            _Share(job, proposal.tokens, proposal, len(job.committed) - 1)
            for job, proposal in zip(jobs, proposals, strict=True)
        ]

    def _depths(self, jobs: list[Job]) -> list[int]:
        if not jobs:
            return []
        rates = [
            job.drafter.rates(job.committed, min(job.decoder.max_draft, job.max_depth))
            if job.drafter
            else []
            for job in jobs
        ]
        context = sum(len(job.committed) for job in jobs) // len(jobs)
        rows = min(self._cache.max_rows, self._cache.n_batch // 2) - len(self._running)
        held = num_held([job.sequence for job in self._running if job.sequence])
        needed = sum(job.num_pending for job in self._running)
        cells = self._cache.num_cells - held - needed
        return best_depths(
            rates,
            lambda width: self._learned.cost.seconds(width, context),
            limit=max(0, min(rows, cells)),  # a draft displaces no other job
        )

    def _read(self, room: int) -> list[_Share]:
        """Pieces of prompts, `room` tokens at most."""
        shares: list[_Share] = []
        reading = [job for job in self._running if job.num_pending > 1]
        room = min(room, self.params.prompt_chunk)
        for place, job in enumerate(reading):
            if room < 1:
                break
            if not self._takes_up_prefix(job, reading[:place]):
                continue
            pending = job.num_pending
            proposal = job.propose(0) if pending <= room else None
            cached = len(job.committed) - pending
            tokens = job.committed[cached : cached + room]
            shares.append(_Share(job, tokens, proposal, cached))
            room -= len(tokens)
        return shares

    def _takes_up_prefix(self, job: Job, ahead: list[Job]) -> bool:
        """Begin with what the cache holds; False where a longer beginning is being read now."""
        sequence = job.sequence
        assert sequence is not None
        if sequence.tokens or not self._cache.can_truncate:
            return True
        held = [one.sequence for one in self._running if one.sequence and one is not job]
        length, source = longest_prefix(job.committed, [*self._kept, *held])
        if coming_prefix(job.committed, ahead) >= length + WORTHWHILE:
            return False
        if source is not None:
            sequence.share(source, length)
            self._kept.used(source)
            if job.num_tokens == 0:
                job.decoder.stats.num_cached_tokens = length
            self.stats.num_cached_tokens += length
        return True

    def _with_room(self, shares: list[_Share]) -> list[_Share]:
        """Free cells where a pass needs more than there are: kept ones, then the youngest job's."""
        while sum(len(share.tokens) for share in shares) > self._cache.num_free:
            if self._kept.drop_oldest():
                continue
            job = self._running.pop()
            job.displace()
            self._waiting.appendleft(job)
            self.stats.num_displaced += 1
            shares = [share for share in shares if share.job is not job]
        return shares

    def _learn(self, shares: list[_Share], seconds: float) -> None:
        width = sum(len(share.tokens) for share in shares)
        self.stats.record(width, sum(share.num_rows for share in shares), seconds)
        if shares[0].job.drafts_alone:
            return
        if all(share.proposal and len(share.proposal.pending) == 1 for share in shares):
            context = sum(share.cached for share in shares) // len(shares)
            self._learned.cost.observe(width, context, seconds)

    def forget(self) -> None:
        """Free the cells that ended sequences left for prompts to come."""
        while self._kept.drop_oldest():
            pass

    def without_draft(self) -> None:
        """Draft by lookup from now on: the draft model is to be freed."""
        self._alone = None
        for job in [*self._running, *self._waiting]:
            job.without_draft()

    def move(self, cache: SequenceCache) -> None:
        """Go on in another cache; while idle, with nothing kept."""
        if not self.idle or len(self._kept):
            raise AssertionError("sequences cannot be moved")
        self._cache = cache

    def close(self) -> None:
        """Drop all jobs."""
        for job in [*self._running, *self._waiting]:
            self.cancel(job)
        self.forget()
