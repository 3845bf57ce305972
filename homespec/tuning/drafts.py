"""Tuning the draft: copies in other types, the cheapest switches for each, and which one pays.

The target verifies, so a draft may be changed in every way; what counts is its cost against how
often it still agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from homespec.errors import CannotRunError, ModelError
from homespec.llama.cache_filler import fill
from homespec.llama.devices import num_threads
from homespec.llama.model import Model
from homespec.llama.quantizer import QUANTIZATIONS
from homespec.models.gguf_header import read_header
from homespec.models.references import shard_names
from homespec.tuning import fit
from homespec.tuning.agreement import ROWS, Agreement, Reading, agreement
from homespec.tuning.cost import CostCurve
from homespec.tuning.fitted import digest_of, drop_unused, fitted_draft
from homespec.tuning.measure import (
    Timings,
    cheapest,
    choose_threads,
    contest,
    interleave,
    opened,
    points,
    settled,
    time_table,
    time_token,
)
from homespec.tuning.notebook import Notebook
from homespec.tuning.placement import Placement
from homespec.tuning.profile import (
    SHIPPED,
    FittedDraft,
    Switches,
    VariantResult,
    plain,
    typed,
)
from homespec.tuning.target import context_lengths

CACHES = (("f16", "f16"), ("bf16", "bf16"), ("f32", "f32"), ("q8_0", "q8_0"))
WIDTHS = (1, 2, 4, 8, 16)
SLOW_TO_MAKE = ("IQ4_NL",)
"""Types whose copies take minutes to make; tried when asked for thoroughness."""

MARGIN = 0.03
"""By how much a copy may happen to agree more than the draft it was made of."""

FIRST_LOOK = 1.1
"""How many times slower than in truth a draft may seem when it is timed once."""

Values = dict[str, Any]


class DraftTuner:
    """Tries the draft as shipped and its copies, one loaded at a time."""

    def __init__(
        self,
        path: Path,
        placement: Placement,
        book: Notebook,
        budget: float,
        *,
        target: CostCurve,
        readings: list[Reading],
        thorough: bool,
    ) -> None:
        self.path, self._placement, self._book, self._budget = path, placement, book, budget
        self._target, self._readings, self._thorough = target, readings, thorough
        self.notes: list[str] = []
        self.digest = ""
        self.best: Values = {}
        self.best_fitted: FittedDraft | None = None
        self.tried: list[Values] = []

    def run(self) -> None:
        """Try everything; `best` and `best_fitted` say what to load."""
        self.digest = self._book.stage("draft's digest", lambda: digest_of(self.path))
        shipped = self._book.stage(f"draft {SHIPPED}", lambda: self._try(SHIPPED, self.path, None))
        self.best, self.tried = shipped, [shipped]
        types = matrix_types(self.path)
        for name in QUANTIZATIONS:
            if types == {name}:
                continue
            if name in SLOW_TO_MAKE and not self._thorough:
                self.notes.append(
                    f"{name} was left out: it takes minutes to make. Try it with --thorough."
                )
                continue
            self._try_copy(name)
            drop_unused(self.digest, self.best_fitted)

    def _try_copy(self, name: str) -> None:
        def make() -> FittedDraft:
            self._book.tell(0.0, f"making a {name} copy of the draft")
            return fitted_draft(
                self.path, self.digest, name, progress=lambda share: self._book.tell(share / 2)
            )

        def attempt() -> Values:
            bound = min(1.0, self.tried[0]["greedy"] + MARGIN)
            return self._try(name, Path(make().path), bound)

        try:
            result = self._book.stage(f"draft {name}", attempt)
            if fit.beats(result["speedup"], self.best["speedup"]):
                # There already, unless it was an earlier run that tried it.
                self.best_fitted = make()
                self.best = result
            self.tried.append(result)
        except (ModelError, CannotRunError) as exc:
            self.notes.append(f"{name} was left out: {exc.message}")

    def _try(self, name: str, path: Path, bound: float | None) -> Values:
        """Measure one draft. bound: the most agreement it can have; None: it is to be measured."""
        with self._placement.load_draft(path) as model:
            self._book.tell(0.5, f"timing the draft, {name}")
            switches, curve = self._cheapest(model, bound)
            if bound is not None and self._hopeless(bound, curve):
                parts: list[tuple[str, Agreement]] = []
            else:
                self._book.tell(0.7, f"comparing the draft, {name}, with the target")
                parts = self._agree(model, switches)
        pooled = Agreement.pooled([part for _, part in parts])
        greedy, sampled = (pooled.greedy, pooled.sampled) if parts else (bound or 0.0, bound or 0.0)
        found = fit.mean_best((greedy, sampled), self._target, curve)
        return {
            "quantization": name,
            "size_bytes": path.stat().st_size,
            "switches": plain(switches),
            "curve": curve.as_dict(),
            "measured": bool(parts),
            "greedy": greedy,
            "sampled": sampled,
            "count": pooled.count,
            "kinds": [{"kind": kind, **asdict(part)} for kind, part in parts],
            "depth": found.depth,
            "speedup": found.speedup,
        }

    def _cheapest(self, model: Model, bound: float | None) -> tuple[Switches, CostCurve]:
        """The best switches and what passes cost with them.

        A copy attends as its parent does and takes its switches; one that a single look finds far
        too dear is not looked at again.
        """
        if bound is None:
            switches = self._threads(model, self._switches(model))
            return switches, self._cost(model, switches)
        switches = typed(Switches, self.tried[0]["switches"])
        first = self._cost(model, switches, once=True)
        if self._hopeless(bound, first, unsure=FIRST_LOOK):
            return switches, first
        switches = self._threads(model, switches)
        return switches, self._cost(model, switches)

    def _hopeless(self, bound: float, curve: CostCurve, unsure: float = 1.0) -> bool:
        """Whether even this much agreement could not make it the best so far.

        unsure: how many times faster it may be than these timings say.
        """
        hoped = fit.mean_best((bound,), self._target, curve)
        return not fit.beats(unsure * hoped.speedup, self.best["speedup"])

    def _switches(self, model: Model) -> Switches:
        length = min(fit.CONTEXT_LENGTH, context_lengths(model.n_ctx_train)[1])
        cores = num_threads()
        tried = [Switches(flash, k, v, cores, cores) for k, v in CACHES for flash in ("off", "on")]

        def ready(switches: Switches, stack: ExitStack) -> Callable[[], Timings]:
            context = stack.enter_context(opened(model, switches, length + 64))
            fill(context, length)
            time_token(context)

            def time() -> Timings:
                return {
                    f"{n}.{i}": settled(context, n, time_token) for n in (1, 2) for i in range(3)
                }

            return time

        return cheapest(contest(tried, ready, 0.02 * self._budget), tried).switches

    def _threads(self, model: Model, switches: Switches) -> Switches:
        """The switches with the best numbers of threads."""
        length = min(fit.CONTEXT_LENGTH, context_lengths(model.n_ctx_train)[1])
        with opened(model, switches, length + 64) as context:
            fill(context, length)
            return choose_threads(context, switches, 4, 0.02 * self._budget)

    def _cost(self, model: Model, switches: Switches, *, once: bool = False) -> CostCurve:
        lengths = context_lengths(model.n_ctx_train)
        seconds = 0.0 if once else 0.03 * self._budget
        with opened(model, switches, lengths[-1] + 64) as context:
            timings = interleave(
                lambda: time_table(context, lengths, WIDTHS, time_token), [], seconds
            )
        return CostCurve.from_points(points(timings))

    def _agree(self, model: Model, switches: Switches) -> list[tuple[str, Agreement]]:
        n_ctx = min(model.n_ctx_train, max(len(one.tokens) for one in self._readings) + 1)
        with opened(model, switches, n_ctx, max_rows=ROWS) as context:
            return [(one.kind, agreement(context, one)) for one in self._readings]

    def pays(self) -> bool:
        """Whether the best draft is faster than plain decoding on some kind of text."""
        curve = CostCurve.from_dict(self.best["curve"])
        kinds: dict[str, list[Agreement]] = {}
        for one in self.best["kinds"]:
            part = Agreement(one["greedy"], one["sampled"], one["count"])
            kinds.setdefault(one["kind"], []).append(part)
        chances = [
            chance
            for parts in kinds.values()
            for chance in (Agreement.pooled(parts).greedy, Agreement.pooled(parts).sampled)
        ]
        return any(fit.beats(fit.best(c, self._target, curve).speedup, 1.0) for c in chances)

    def variants(self) -> tuple[VariantResult, ...]:
        """What was tried, for the profile."""
        return tuple(_result(one) for one in self.tried)


def _result(one: Mapping[str, Any]) -> VariantResult:
    return VariantResult(
        quantization=one["quantization"],
        size_bytes=one["size_bytes"],
        switches=typed(Switches, one["switches"]),
        cost=CostCurve.from_dict(one["curve"]),
        greedy=one["greedy"] if one["measured"] else None,
        sampled=one["sampled"] if one["measured"] else None,
        depth=one["depth"],
        speedup=one["speedup"],
    )


def matrix_types(path: Path) -> set[str]:
    """The types of a model's matrices."""
    headers = [read_header(path.with_name(name)) for name in shard_names(path.name)]
    return {t.type_name for h in headers for t in h.tensors if len(t.shape) > 1}
