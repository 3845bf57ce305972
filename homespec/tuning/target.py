"""Tuning the target: switches that change no result, the cost of its passes, and bit-exactness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from homespec.errors import CannotRunError, OutOfMemoryError, RefusedError
from homespec.llama.cache_filler import fill
from homespec.llama.context import Context
from homespec.llama.devices import num_threads
from homespec.llama.library import build_features, has_own_kernels
from homespec.llama.model import Model
from homespec.llama.tokenizer import Tokenizer
from homespec.models.gguf_header import join_shards, read_header
from homespec.models.gguf_parser import Tensor
from homespec.models.kernels import own_kernels_serve
from homespec.models.references import shard_names
from homespec.models.repacking import copied_bytes
from homespec.tuning import agreement
from homespec.tuning.child_arm import ChildArm
from homespec.tuning.cost import WIDTHS, CostCurve
from homespec.tuning.fit import CONTEXT_LENGTH
from homespec.tuning.invariance import WIDTHS as PROBE_WIDTHS
from homespec.tuning.invariance import probe_widths
from homespec.tuning.measure import (
    Timings,
    cheapest,
    choose_threads,
    contest,
    disturbance,
    interleave,
    opened,
    points,
    score,
    settled,
    time_pass,
    time_table,
    together,
)
from homespec.tuning.notebook import Notebook
from homespec.tuning.placement import Placement
from homespec.tuning.profile import Switches, plain, typed
from homespec.tuning.texts import SAMPLES

LOSSLESS_CACHES = (("f16", "f16"), ("f16", "bf16"), ("bf16", "bf16"), ("f32", "f32"))
CONTEST_WIDTHS = (1, 4, 8)
NARROW = tuple(width for width in WIDTHS if width <= 8)
WIDE = tuple(width for width in WIDTHS if width > 8)  # two thirds of the time of a round
STRICT_WIDTHS = (1, 2, 4, 8, 16)  # between them there are small steps only
KERNEL_WIDTHS, KERNEL_ROUNDS = (8, 16), 3
KERNELS_WORTH = 1.03
"""How much slower the kernels that llama.cpp takes by itself may seem before they are left."""

CONTEST_LENGTH = 1200
"""Tokens of context: flash attention gains or loses with them."""

EXACT_WORTH = 1.05
"""What width-invariant settings may cost, as ratio to the fastest, to be taken unasked."""

MIN_BUDGET, MAX_BUDGET = 20.0, 120.0
Values = dict[str, Any]


def context_lengths(n_ctx_train: int) -> tuple[int, ...]:
    """Where costs are measured; a little below the multiples of 256 that llama.cpp pads to."""
    room = n_ctx_train - max(WIDTHS)
    return tuple(sorted({min(64, room), min(CONTEXT_LENGTH, room // 2), min(2000, room)}))


class TargetTuner:
    """The stages that need the target's weights; they are loaded when the first one runs."""

    def __init__(
        self, path: Path, placement: Placement, book: Notebook, budget: float | None
    ) -> None:
        """budget: seconds for everything, of which each stage takes a share; None: by its speed."""
        self.path, self._placement, self._book = path, placement, book
        self._stack = ExitStack()
        self._repack = True
        self._budget = budget or 0.0

    @property
    def budget(self) -> float:
        """The seconds for what is repeated: those asked for, or 90 for a model of 60 ms."""
        if not self._budget:
            token_seconds: float = self._book.stage("first look", self._first_look)
            self._budget = max(MIN_BUDGET, min(MAX_BUDGET, 1500 * token_seconds))
        return self._budget

    def _first_look(self) -> float:
        cores = num_threads()
        with opened(self.model, Switches("auto", "f16", "f16", cores, cores), 64) as context:
            _require_rollback(context)
            time_pass(context, 1)
            return min(time_pass(context, 1) for _ in range(3))

    @cached_property
    def model(self) -> Model:
        """The weights, in the layout that was last asked for."""
        self._book.tell(0.0, f"loading {self.path.name}")
        load = self._placement.load(self.path, repack=self._repack)
        return self._stack.enter_context(load)

    def _opened(
        self, switches: Switches, n_ctx: int, **sizes: int
    ) -> AbstractContextManager[Context]:
        """A context of the weights in the layout of the switches, as later runs will have them."""
        if switches.repack != self._repack:
            self.close()
            self._repack = switches.repack
        return opened(self.model, switches, n_ctx, **sizes)

    def close(self) -> None:
        """Free the weights."""
        self._stack.close()
        self.__dict__.pop("model", None)

    @property
    def lengths(self) -> tuple[int, ...]:
        return context_lengths(self.model.n_ctx_train)

    @property
    def n_ctx(self) -> int:
        return self.lengths[-1] + max(WIDTHS)

    # Stage: kernels

    def kernels(self) -> Values:
        """Whether llama.cpp's kernels for many tokens are the faster ones here, as it takes them.

        Tiles from eight tokens on, and repacked weights; against a token at a time, or homespec's
        kernels where these multiply most of the model. One process after the other, so that no more
        memory is taken than a single load takes. What llama.cpp does by itself stays after one
        look; to leave it takes two.
        """
        cores = num_threads()
        usual = Switches("auto", "f16", "f16", cores, cores)
        other = replace(
            usual, repack=not (has_own_kernels() and own_kernels_serve(self._tensors()))
        )
        tables: dict[bool, list[Timings]] = {True: [], False: []}
        for number, tiled in enumerate((True, False, False, True)):
            self._book.tell(number / 4, "trying kernels")
            switches = usual if tiled else other
            with ChildArm(self.path, switches, 128, self._placement, tiled=tiled) as arm:
                tables[tiled] += [arm.table((64,), KERNEL_WIDTHS) for _ in range(KERNEL_ROUNDS)]
            if number == 1 and _tiled_pay(tables):
                break
        return {"tiled": _tiled_pay(tables)}

    def _tensors(self) -> tuple[Tensor, ...]:
        names = shard_names(self.path.name)
        return join_shards([read_header(self.path.with_name(name)) for name in names]).tensors

    # Stage: switches

    def switches(self) -> Values:
        """The cheapest settings that lose nothing, and what each tried one costs."""
        length = min(CONTEST_LENGTH, self.lengths[-1])
        cores = num_threads()
        tried = [
            Switches(flash, k, v, cores, cores)
            for k, v in LOSSLESS_CACHES
            for flash in ("off", "on")
        ]

        def ready(switches: Switches, stack: ExitStack) -> Callable[[], Timings]:
            model = self.model
            if switches.repack != self._repack:
                load = self._placement.load(self.path, repack=switches.repack)
                model = stack.enter_context(load)
            context = stack.enter_context(opened(model, switches, length + max(WIDTHS)))
            fill(context, length)
            time_pass(context, 1)  # the first pass sets its graph up
            return lambda: {str(n): settled(context, n) for n in CONTEST_WIDTHS}

        ranked = contest(tried, ready, 0.12 * self.budget)
        best = cheapest(ranked, tried).switches
        if self._is_repacked():
            both = [best, replace(best, repack=False)]
            best = cheapest(contest(both, ready, 0.04 * self.budget), both).switches
        costs = [{"switches": plain(one.switches), "seconds": one.seconds} for one in ranked]
        return {"switches": plain(best), "tried": costs}

    def _is_repacked(self) -> bool:
        """Whether the CPU would keep some weights in another layout than the file's."""
        features = frozenset(build_features().get("CPU", ()))
        return any(copied_bytes(tensor, features) for tensor in self._tensors())

    def invariant_switches(self, tried: Values) -> Values:
        """The cheapest width-invariant ones of those within 5 %, else the cheapest of all.

        With what the probe found: {"switches", "invariant", "largest", "slowdown"}.
        """
        fastest = tried["tried"][0]["seconds"]
        chosen = typed(Switches, tried["switches"])
        near = [
            (typed(Switches, one["switches"]), one["seconds"] / fastest)
            for one in tried["tried"]
            if one["seconds"] <= EXACT_WORTH * fastest
        ]
        near = [(replace(one, repack=chosen.repack), ratio) for one, ratio in near]
        near.sort(key=lambda pair: pair[0] != chosen)
        first: Values | None = None
        for number, (switches, ratio) in enumerate(near):
            self._book.tell(number / len(near), "comparing passes bit by bit")
            with self._opened(switches, 600 + max(WIDTHS)) as context:
                report = probe_widths(context, (64,), (2, PROBE_WIDTHS[-1]))
                if report.invariant:
                    report = probe_widths(context)
            found = {
                "switches": plain(switches),
                "invariant": report.invariant,
                "largest": report.largest,
                "slowdown": ratio,
            }
            first = first or found
            if report.invariant:
                return found
        if first is None:
            raise AssertionError("the fastest switches are always near themselves")
        return first

    def threads(self, switches: Switches) -> Values:
        """The switches with the best numbers of threads."""
        length = min(CONTEXT_LENGTH, self.lengths[1])
        with self._opened(switches, length + max(WIDTHS)) as context:
            fill(context, length)
            return _plain(choose_threads(context, switches, 8, 0.05 * self.budget))

    # Stage: cost

    def cost(self, switches: Switches) -> Values:
        """The cost curve, with how much the machine was disturbed."""
        with self._opened(switches, self.n_ctx) as context:

            def timed(name: str, widths: Sequence[int], share: float) -> Timings:
                rounds = self._book.rounds(name)
                return interleave(
                    lambda: time_table(context, self.lengths, widths),
                    rounds,
                    share * self.budget,
                    self._noted(rounds),
                )

            wide = timed("wide passes", (1, NARROW[-1], *WIDE), 0.12)
            narrow = timed("narrow passes", NARROW, 0.2)
            timings = together(narrow, wide)
        curve = CostCurve.from_points(points(timings))
        disturbed = disturbance(self._book.rounds("narrow passes"))
        return {"curve": curve.as_dict(), "disturbance": disturbed}

    def _noted(self, rounds: list[Timings]) -> Callable[[], None]:
        def note() -> None:
            self._book.save()
            self._book.tell(len(rounds) / (len(rounds) + 2))

        return note

    # Stage: strictly exact settings, in a child process

    def strict(self, switches: Switches, settings: Mapping[str, Any]) -> Values:
        """What strictly exact settings promise and cost: {"problem"} where they do not run.

        Both processes are timed in turn on the same widths; the curve is the child's, from the
        shortest and the longest context.
        """
        exact = replace(switches, **settings)
        lengths = tuple(dict.fromkeys((self.lengths[0], self.lengths[-1])))
        tables: list[Timings] = []
        ours: list[Timings] = []
        try:
            with (
                ChildArm(self.path, exact, self.n_ctx, self._placement, exact=True) as arm,
                self._opened(switches, self.n_ctx) as context,
            ):
                promise = arm.probe()
                self._book.tell(0.3)

                def both() -> Timings:
                    tables.append(arm.table(lengths, STRICT_WIDTHS))
                    ours.append(time_table(context, lengths, STRICT_WIDTHS))
                    return tables[-1]

                timings = interleave(both, [], 0.06 * self.budget)
        except (CannotRunError, OutOfMemoryError) as exc:
            return {"problem": exc.message}
        promise = replace(promise, slowdown=score(tables) / score(ours))
        curve = CostCurve.from_points(points(timings))
        return {"promise": plain(promise), "curve": curve.as_dict()}

    # Stage: texts

    def readings(self, switches: Switches, token_seconds: float) -> list[Values]:
        """What the target says on the sample texts; slow machines read less of each."""
        seconds = 0.15 * self.budget
        # Half of the samples are written token by token; prompts and the others are read faster.
        tokens = int(seconds / (len(SAMPLES) * 1.2 * token_seconds))
        tokens = max(16, min(96, tokens))
        n_ctx = min(self.model.n_ctx_train, 1024)
        with self._opened(switches, n_ctx, max_rows=agreement.ROWS) as context:
            tokenizer = Tokenizer(self.model)
            found = agreement.read_samples(context, tokenizer, tokens, self._book.tell)
        return [reading.as_dict() for reading in found]


def _tiled_pay(tables: Mapping[bool, list[Timings]]) -> bool:
    """The first passes of a process read the weights; the fastest ones are the kernels' own."""
    best = {
        tiled: sum(min(table[key] for table in found) for key in found[0])
        for tiled, found in tables.items()
    }
    return best[True] <= KERNELS_WORTH * best[False]


def _plain(value: Any) -> Values:
    values: Values = plain(value)
    return values


def _require_rollback(context: Context) -> None:
    if not context.can_truncate:
        raise RefusedError(
            f"{context.model.path.name} cannot take tokens back, so nothing can be drafted for it.",
            hint="It is decoded plainly: there is nothing to tune.",
        )
