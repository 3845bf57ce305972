"""A target loaded for many sequences at once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from homespec.decoding.depth import PassCost
from homespec.decoding.sampling import MAX_SEED, SamplingParams
from homespec.drafters.adaptive import Priors
from homespec.errors import PlanError, UsageError
from homespec.generation import MAX_DRAFT_DEPTH, GenerateParams
from homespec.llama.context import Context
from homespec.llama.devices import offload_devices
from homespec.llama.sequences import SequenceCache
from homespec.loading import LoadedTarget, LoadParams, LoadProgress, Prompt, check_files
from homespec.models.memory_plan import Plan
from homespec.models.tokenizer_check import Compatibility
from homespec.scheduling import parallel as counts
from homespec.scheduling.job import Request
from homespec.scheduling.scheduler import ScheduleParams, Scheduler
from homespec.speculation import Pairing, Speculation, build

MAX_PARALLEL = 128
_ROWS_EACH = 3  # logits of a pass: drafts are shared out, a few sequences take more
_LEAST_ROWS = MAX_DRAFT_DEPTH + 1  # of one that drafts alone


class ParallelEngine(LoadedTarget):
    """A target with a cache for many sequences, and the scheduler that runs them.

    parallel: how many run at once. row_ctx: tokens that one may hold, prompt and answer.
    """

    cache: SequenceCache

    def __init__(
        self,
        target: Path,
        params: LoadParams | None = None,
        progress: LoadProgress | None = None,
        *,
        draft: Path | None = None,
        parallel: int | None = None,
        most: int = counts.COUNTS[-1],
        prompt_chunk: int = 512,
        keep: int = 2,
        shared_tokens: int = 0,
    ) -> None:
        """Load the target.

        params: as for Engine; n_ctx is what one sequence may hold. draft: drafts for a sequence
        while it is alone: for servers, where that is common. parallel: None for the number
        that this machine does best with, `most` at most. prompt_chunk, keep, shared_tokens: as
        ScheduleParams have them. Raises as Engine does.
        """
        if parallel is not None and not 1 <= parallel <= MAX_PARALLEL:
            raise UsageError(f"{parallel} sequences at once are not 1 to {MAX_PARALLEL}.")
        self.parallel = max(1, min(most, counts.COUNTS[-1])) if parallel is None else parallel
        self._chosen = parallel is not None or self.parallel == 1
        self._kept = keep
        self._cost: PassCost | None = None
        super().__init__(target, draft, params, progress)
        schedule = ScheduleParams(self.parallel, self.row_ctx, prompt_chunk, keep, shared_tokens)
        alone = self._alone if self.draft_context else None
        self.scheduler = Scheduler(self.cache, self.tokenizer, self.learned, schedule, alone)

    def _suited(self, params: LoadParams, asked: LoadParams) -> LoadParams:
        """Flash attention and cache types as asked for: one sequence does best with others.

        Without flash attention every token is multiplied with the cells of all sequences. On the
        CPU a bf16 V has llama.cpp pass over what is another's cell by cell; with f16 it does so
        in tiles, and sums in f16.
        """
        kind = asked.cache_type_v
        on_cpu = asked.gpu_layers == 0 or not offload_devices(
            list(asked.devices) if asked.devices else None
        )
        if on_cpu and kind == "f16" and asked.flash_attention != "off":
            kind = "bf16"
        return replace(
            params,
            flash_attention=asked.flash_attention,
            cache_type_k=asked.cache_type_k,
            cache_type_v=kind,
        )

    def _plan(
        self, target: Path, draft: Path | None, params: LoadParams
    ) -> tuple[Compatibility | None, Plan]:
        """As many cells as fit, up to what so many sequences take mostly."""

        def sized(cells: int) -> Plan:
            wanted = replace(params, n_ctx=cells, max_draft_depth=self._num_rows() - 1)
            return check_files(target, draft, wanted)[1]

        def fits(cells: int) -> bool:
            try:
                sized(cells)
            except PlanError:
                return False
            return True

        compatibility, least = check_files(target, draft, params)  # refuses what holds not even one
        self.row_ctx = least.target.n_ctx
        cells = counts.largest_that_fits(fits, self._num_cells(), self.row_ctx)
        return compatibility, sized(cells)

    def _num_rows(self) -> int:
        return max(self.parallel * _ROWS_EACH, _LEAST_ROWS)

    def _num_cells(self) -> int:
        return max(self.row_ctx, self.parallel * min(self.row_ctx, counts.CELLS_EACH))

    def _open_caches(self, draft: Path | None, progress: LoadProgress | None) -> None:
        if not self._chosen:
            self._cost = super()._priors().cost or self._probe()
            self.parallel = counts.best_parallel(self._cost, self.parallel)
        settings = replace(
            self._target_context(self.params),
            n_ctx=min(self._num_cells(), self.params.n_ctx),
            max_rows=self._num_rows(),
            sequences=max(self.parallel + self._kept, 2),
            snapshots=0,
        )
        self.cache = self._keep(SequenceCache(self.model, settings))
        if draft is not None:
            self.draft_context = self._load_draft(draft, self.row_ctx, progress)

    def _alone(self, params: GenerateParams, sampling: SamplingParams) -> Speculation:
        pairing = Pairing(
            self.cache.context, self.draft_context, self.compatibility, self.tokenizer.end_tokens
        )
        # The match rule, as in company: a seed gives one text, whoever came and went.
        return build(pairing, replace(params, rule="match"), sampling, self.learned)

    def _probe(self) -> PassCost:
        widest = max(counts.PROBE_WIDTHS)
        length = counts.PROBE_CONTEXT + widest
        settings = replace(
            self._target_context(self.params), n_ctx=length, n_batch=length, max_rows=widest
        )
        with Context(self.model, settings) as context:
            return counts.probe(context, self.parallel)

    def _priors(self) -> Priors:
        known = super()._priors()
        return replace(known, cost=known.cost or self._cost)

    def request(
        self,
        prompt: Prompt | list[int],
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        params: GenerateParams | None = None,
    ) -> Request:
        """What `scheduler.submit` takes, for text, messages or token ids.

        Without a seed one is drawn. Raises as `encode`.
        """
        params, sampling = params or GenerateParams(), sampling or SamplingParams()
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.SystemRandom().randint(0, MAX_SEED))
        return Request(self._tokens(prompt, system, params), sampling, params)

    def drop_draft(self) -> bool:
        """Free the draft model, between two steps; whether there was one."""
        if self.draft_context is None:
            return False
        self.scheduler.without_draft()
        context, self.draft_context = self.draft_context, None
        context.close()
        context.model.close()
        return True

    def shrink(self) -> bool:
        """Forget ended sequences, and keep cells for one sequence only; whether that was possible.

        Not while one runs: to forget alone frees no memory, and nothing is forgotten then. Raises
        OutOfMemoryError, and the engine is then of no use.
        """
        if not self.scheduler.idle or self.cache.num_cells <= self.row_ctx:
            return False
        self.scheduler.forget()
        settings = replace(self.cache.context.params, n_ctx=self.row_ctx)
        self.cache.close()
        self.cache = self._keep(SequenceCache(self.model, settings))
        self.scheduler.move(self.cache)
        return True

    def close(self) -> None:
        """Drop all jobs, free caches and weights; once is enough, twice does no harm."""
        if "scheduler" in vars(self) and self._open:
            self.scheduler.close()
        super().close()
