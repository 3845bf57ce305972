"""`homespec setup`: from a bare machine to a pair that was tuned on it and is the default.

Looks at the machine, proposes the best pair for it, plans its memory from the headers alone, and
only then downloads, loads, tunes and tries it. What is told and asked goes through `Guide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from homespec.checking import Report, check_pair
from homespec.doctor import diagnose
from homespec.engine import Engine, LoadParams
from homespec.errors import HomespecError, LibraryError, NetworkError
from homespec.fetching import as_planned
from homespec.llama.devices import num_threads
from homespec.models import sources
from homespec.models.catalog import Pair, load_catalog
from homespec.models.default_pair import store_default
from homespec.models.machine import Machine
from homespec.models.memory_plan import ModelPlan, PlanRequest, require
from homespec.models.pairs import STARTER, Name, fetch_pair, find_pair, missing_parts
from homespec.models.plan_words import size
from homespec.planning import this_machine
from homespec.shelf import Entry, list_pairs
from homespec.trial import Trial, run_trial
from homespec.tune import tune_pair
from homespec.tuning.notebook import Progress
from homespec.tuning.profile import load_profile

# A token reads all the weights once. Home servers read some 6 GB/s a core and 40 GB/s in all, and
# below five tokens a second nobody likes to wait for an answer.
_BYTES_PER_CORE, _MOST_BYTES, _LEAST_TOKENS_PER_SECOND = 6e9, 40e9, 5


class Guide(Protocol):
    """Whoever leads the user through it."""

    def note(self, text: str) -> None:
        """A sentence."""

    def working(self, text: str) -> None:
        """What is being done from now on; it may take a while."""

    def report(self, report: Report) -> None:
        """What check and plan found."""

    def download(self, name: str, done: int, total: int | None) -> None:
        """A download moved on."""

    def measuring(self) -> AbstractContextManager[Progress]:
        """Something is measured for minutes; yields what is to be told of its progress."""

    def agrees(self, pair: Pair, download_bytes: int) -> bool:
        """Whether this pair shall be downloaded, tried and made the default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for on the command line. tune: measure what the machine does best, too."""

    catalog: Name | None = None
    offline: bool = False
    request: PlanRequest = field(default_factory=PlanRequest)
    tune: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is the default now.

    dropped_draft: the draft that was tried and does not pay. instead_of: the pair that was meant
    and could not be reached.
    """

    pair: Pair
    report: Report
    trial: Trial
    dropped_draft: str | None = None
    instead_of: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.pair.name,
            "target": str(self.pair.target.source),
            "draft": str(self.pair.draft.source) if self.pair.draft else None,
            "dropped_draft": self.dropped_draft,
            "instead_of": self.instead_of,
            "trial": self.trial.as_dict(),
            "plan": self.report.plan.as_dict(),
        }


def set_up(name: Name | None, settings: Settings, guide: Guide) -> Outcome | None:
    """Set up the pair of this name, or the best one for this machine; None where it is declined.

    Where the hub is out of reach it is the starter that is set up. Raises PlanError for a pair
    that does not fit, LibraryError where llama.cpp does not run, and what fetching raises.
    """
    machine = this_machine()
    guide.note(_describe(machine))
    search = _Search(settings, machine, guide)
    choice = search.best() if name is None else search.named(name)
    require(choice.report.plan)
    guide.report(choice.report)
    pair = as_planned(choice.pair, choice.report, guide.note)
    if not guide.agrees(pair, _download_bytes(pair, choice)):
        return None
    target, draft = fetch_pair(pair, progress=guide.download, offline=settings.offline)
    planned = choice.report.plan
    for path, model in ((target, planned.target), (draft, planned.draft)):
        if path and model:
            guide.working(f"Self-test of {path.name} in a process of its own")
            _self_test(path, model)
    if settings.tune:
        _tune(target, draft, settings.request.n_ctx, guide)
    trial = _try(target, draft, choice.report, guide)
    kept = pair
    if pair.draft and trial.objection:
        guide.note(f"{pair.draft.name} is not used: {trial.objection}. N-grams draft instead.")
        kept = replace(pair, drafts=())
    store_default(replace(kept, n_ctx=settings.request.n_ctx))
    dropped = pair.draft.name if pair.draft and not kept.draft else None
    return Outcome(kept, choice.report, trial, dropped, choice.instead_of)


def suggest(entries: Sequence[Entry], machine: Machine, num_cores: int) -> list[Pair]:
    """The pairs that would do well on a machine, the best first; the starter is the last resort.

    What was seen running first, the largest class of memory first, then as listed.
    """
    by_cores = min(_BYTES_PER_CORE * num_cores, _MOST_BYTES) / _LEAST_TOKENS_PER_SECOND
    # An integrated GPU reads the same slow memory as the cores do.
    devices = [device for device in machine.offload_devices if device.kind == "gpu"]
    on_devices = 0.8 * sum(device.free_bytes for device in devices)

    def is_quick(pair: Pair) -> bool:
        rough = 0.8e9 * (pair.min_memory_gb or 0)
        return (pair.target.size_bytes or rough) <= max(by_cores, on_devices)

    good = [
        entry.pair
        for entry in entries
        if entry.suits
        and entry.fit.verdict == "fits"
        and entry.pair.name != STARTER
        and is_quick(entry.pair)
        # nobody shall be led into a licence that forbids a use
        and "non-commercial" not in (entry.pair.target.licence or "")
    ]
    good.sort(key=lambda pair: (not pair.seen, -(pair.min_memory_gb or 0)))
    return good + [entry.pair for entry in entries if entry.pair.name == STARTER]


@dataclass(frozen=True, slots=True)
class _Choice:
    pair: Pair
    report: Report
    instead_of: str | None = None


@dataclass(frozen=True, slots=True)
class _Search:
    """The way to a pair whose plan is known."""

    settings: Settings
    machine: Machine
    guide: Guide

    def named(self, name: Name) -> _Choice:
        """The pair of this name, or the starter where the hub is out of reach."""
        try:
            return self._look(name)
        except HomespecError as exc:
            if not _is_unreachable(exc):
                raise
            self.guide.note(exc.message)
        return self._starter(str(name))

    def best(self) -> _Choice:
        """The first suggestion that fits; without a network, of those that are here."""
        unreachable = None
        for pair in suggest(list_pairs(self.settings.catalog), self.machine, num_threads()):
            if pair.name == STARTER:
                break
            if unreachable and missing_parts(pair):
                continue
            try:
                choice = self._look(pair.name)
            except HomespecError as exc:
                self.guide.note(f"{pair.name} is left out. {exc.message}")
                if _is_unreachable(exc):
                    unreachable = unreachable or pair.name
                continue
            if choice.report.plan.verdict == "fits":
                return replace(choice, instead_of=unreachable)
            self.guide.note(f"{pair.name} is left out. {choice.report.plan.sentence}")
        return self._starter(unreachable)

    def _starter(self, instead_of: str | None) -> _Choice:
        if instead_of:
            self.guide.note(
                f"The starter model takes the place of {instead_of}, which cannot be reached now; "
                "homespec setup tries again."
            )
        return replace(self._look(STARTER), instead_of=instead_of)

    def _look(self, name: Name) -> _Choice:
        catalog, offline = self.settings.catalog, self.settings.offline
        self.guide.working(f"Reading the headers of {name}")
        pair = find_pair(name, catalog=catalog, offline=offline)
        report = check_pair(
            pair,
            self.settings.request,
            load_catalog(catalog),
            offline=offline,
            machine=self.machine,
            progress=self.guide.download,
        )
        return _Choice(pair, report)


def _is_unreachable(exc: HomespecError) -> bool:
    """Whether no server answered, in offline mode included."""
    if not isinstance(exc, NetworkError):
        return False
    cause = exc.__cause__
    while cause is not None and getattr(cause, "response", None) is None:
        cause = cause.__cause__
    return cause is None


def _describe(machine: Machine) -> str:
    devices = [f"{device.name} ({size(device.free_bytes)} free)" for device in machine.devices]
    return (
        f"This machine: {num_threads()} cores, {size(machine.ram_free_bytes)} of "
        f"{size(machine.ram_total_bytes)} RAM free, {', '.join(devices) or 'no GPU'}."
    )


def _download_bytes(pair: Pair, choice: _Choice) -> int:
    """The bytes to come, as the headers tell them."""
    report = choice.report
    facts = [report.target, *(draft.facts for draft in report.drafts)]
    files = [choice.pair.target, *choice.pair.drafts]
    return sum(
        known.size_bytes
        for known, file in zip(facts, files, strict=True)
        if file in (pair.target, pair.draft) and sources.locate(file.source) is None
    )


def _self_test(path: Path, planned: ModelPlan) -> None:
    """Load and decode in a child process, which a bad build may kill. Raises LibraryError."""
    names = ("gpu_layers", "cache_type_k", "cache_type_v")
    diagnosis = diagnose(path, {name: getattr(planned, name) for name in names})
    if diagnosis.problem:
        raise LibraryError(diagnosis.problem, hint=diagnosis.cure)


def _tune(target: Path, draft: Path | None, n_ctx: int, guide: Guide) -> None:
    """So that the trial meets the pair at its best; one that cannot be tuned is tried untuned."""
    if load_profile(target, draft)[0] is not None:
        guide.note("It was tuned on this machine before; homespec tune measures it anew.")
        return
    guide.working("Measuring what this machine does best with it, for about two minutes")
    try:
        with guide.measuring() as tell:
            tune_pair(target, draft, progress=tell, load=LoadParams(n_ctx=n_ctx))
    except HomespecError as exc:
        guide.note(f"It is not tuned. {exc.message}")


def _try(target: Path, draft: Path | None, report: Report, guide: Guide) -> Trial:
    guide.working("Loading the models")
    params = LoadParams(**report.plan.load_options())

    def tell(number: int, total: int) -> None:
        guide.working(f"Answering prompt {number} of {total}, plain and speculative")

    with Engine(target, draft, params) as engine:
        return run_trial(engine, progress=tell)
