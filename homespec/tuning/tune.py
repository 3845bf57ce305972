"""Finds out what a box is good at with a pair, and keeps it as a profile."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homespec.errors import LibraryError
from homespec.llama.library import use_exact_kernels
from homespec.models.files import remember_verified, sha256_of
from homespec.models.references import shard_names
from homespec.tuning.agreement import Reading
from homespec.tuning.cost import CostCurve
from homespec.tuning.drafts import SHIPPED, DraftTuner
from homespec.tuning.fitted import drop
from homespec.tuning.measure import DISTURBED
from homespec.tuning.ngram_rates import match_rates
from homespec.tuning.notebook import Notebook, Progress
from homespec.tuning.placement import Placement
from homespec.tuning.profile import (
    VERSION,
    Acceptance,
    Box,
    FileIdentity,
    Profile,
    Switches,
    WidthPromise,
    identify,
    plain,
    profile_path,
    save_profile,
    this_box,
    typed,
)
from homespec.tuning.target import EXACT_WORTH, TargetTuner

_STAGES = {
    "target's kernels": 12.0,
    "target switches": 16.0,
    "target's bits": 8.0,
    "target threads": 6.0,
    "target cost": 36.0,
    "target strictly exact": 26.0,
    "texts": 26.0,
    "draft's digest": 1.0,
    f"draft {SHIPPED}": 12.0,
    "draft Q4_0": 14.0,
    "draft Q4_K": 12.0,
    "draft Q8_0": 12.0,
    "draft Q5_0": 12.0,
}


@dataclass(frozen=True, slots=True)
class TuneParams:
    """How to tune. strict: the settings of strictly exact decoding, fields of Switches.

    budget_seconds: what is repeated, is repeated as often as this allows; None: 20 to 120 by the
    target's speed. thorough: try also
    what takes minutes. fresh: measure anew what an interrupted run has measured.
    """

    strict: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    budget_seconds: float | None = None
    thorough: bool = False
    fresh: bool = False


def tune(
    target: Path, draft: Path | None, params: TuneParams, progress: Progress | None = None
) -> Profile:
    """Measure a pair and keep the profile; what an interrupted run measured is not done again.

    Raises RefusedError for a target that cannot take tokens back, DiskError, OutOfMemoryError,
    ModelError, CannotRunError.
    """
    box = this_box()
    book = _notebook(target, draft, box, params, progress)
    try:
        profile = _measure(target, draft, params, box, book)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "Interrupted. What is measured stays; the same command goes on from there."
        ) from None
    save_profile(profile, target, draft)
    if draft is not None:
        save_profile(profile.of_target_alone(), target)
    book.discard()
    return profile


def _measure(
    target: Path, draft: Path | None, params: TuneParams, box: Box, book: Notebook
) -> Profile:
    tuner = TargetTuner(target, params.placement, book, params.budget_seconds)
    try:
        kernels = book.stage("target's kernels", tuner.kernels)
        tiled = kernels["tiled"] or not _leave_tiled_kernels()
        _ = tuner.budget
        found = _tune_target(tuner, book, params)
        readings = book.stage(
            "texts",
            lambda: tuner.readings(
                found["target_switches"], found["target_cost"].seconds(1, tuner.lengths[1])
            ),
        )
    finally:
        tuner.close()
    texts = [Reading.from_dict(values) for values in readings]
    if draft is not None:
        drafts = DraftTuner(
            draft,
            params.placement,
            book,
            tuner.budget,
            target=found["target_cost"],
            readings=texts,
            thorough=params.thorough,
        )
        found |= _tune_draft(drafts, found["notes"])
    rates = match_rates([(text.tokens, text.start) for text in texts])
    acceptance = Acceptance(found.pop("greedy", None), found.pop("sampled", None), rates)
    return Profile(
        box=box,
        target=_identified(target),
        draft=_identified(draft) if draft else None,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seconds={name: round(value, 2) for name, value in book.seconds.items()},
        tiled=tiled,
        acceptance=acceptance,
        **{**found, "notes": tuple(found["notes"])},
    )


def _leave_tiled_kernels() -> bool:
    """Whether this process can still do without them; else it measures what it decodes with."""
    with suppress(LibraryError):
        use_exact_kernels()
        return True
    return False


def _notebook(
    target: Path, draft: Path | None, box: Box, params: TuneParams, progress: Progress | None
) -> Notebook:
    key = {
        "version": VERSION,
        "box": plain(box),
        "files": [plain(identify(path)) for path in (target, draft) if path],
        "placement": plain(params.placement),
        "strict": dict(params.strict),
        "thorough": params.thorough,
    }
    path = profile_path(target, draft, box).with_suffix(".partial")
    stages = {
        name: weight
        for name, weight in _STAGES.items()
        if draft is not None or not name.startswith("draft")
    }
    book = Notebook(path, key, stages, progress)
    if params.fresh:
        book.discard()
        book = Notebook(path, key, stages, progress)
    return book


def _tune_target(tuner: TargetTuner, book: Notebook, params: TuneParams) -> dict[str, Any]:
    tried = book.stage("target switches", tuner.switches)
    bits = book.stage("target's bits", lambda: tuner.invariant_switches(tried))
    plain_switches = typed(Switches, bits["switches"])
    switches = typed(Switches, book.stage("target threads", lambda: tuner.threads(plain_switches)))
    cost = book.stage("target cost", lambda: tuner.cost(switches))
    notes = []
    if cost["disturbance"] > DISTURBED:
        notes.append(
            "Other programs used the processor while this was measured: tune again when it is idle."
        )
    found: dict[str, Any] = {
        "target_switches": switches,
        "target_cost": CostCurve.from_dict(cost["curve"]),
        "default_promise": WidthPromise(bits["invariant"], bits["largest"], bits["slowdown"]),
        "notes": notes,
    }
    if not bits["invariant"]:
        strict = book.stage("target strictly exact", lambda: tuner.strict(switches, params.strict))
        if "problem" in strict:
            notes.append(f"Strictly exact settings could not be tried: {strict['problem']}")
        else:
            promise = typed(WidthPromise, strict["promise"])
            found["strict_promise"] = promise
            found["strict_cost"] = CostCurve.from_dict(strict["curve"])
            found["strict_by_default"] = promise.invariant and promise.slowdown <= EXACT_WORTH
    return found


def _tune_draft(tuner: DraftTuner, notes: list[str]) -> dict[str, Any]:
    tuner.run()
    pays = tuner.pays()
    best, fitted = tuner.best, tuner.best_fitted
    if fitted and not pays:
        drop(fitted)
        best, fitted = tuner.tried[0], None
    return {
        "draft_switches": typed(Switches, best["switches"]),
        "draft_cost": CostCurve.from_dict(best["curve"]),
        "fitted": fitted,
        "draft_pays": pays,
        "greedy": best["greedy"],
        "sampled": best["sampled"],
        "variants": tuner.variants(),
        "notes": [*notes, *tuner.notes],
    }


def _identified(path: Path) -> FileIdentity:
    """A file's identity, with the digest by which it is known again when copied or renamed."""
    if len(shard_names(path.name)) > 1:
        return identify(path)
    digest = sha256_of(path)
    remember_verified(path, digest)
    return identify(path, sha256=digest)
