"""Finds out what a box is good at with a pair, and keeps it as a profile."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from homespec.errors import HomespecError
from homespec.llama.library import leave_tiled_kernels, tiles_left_out
from homespec.models.files import remembered_sha256
from homespec.models.references import shard_names
from homespec.tuning.agreement import Reading
from homespec.tuning.box import Box, this_box
from homespec.tuning.cost import CostCurve
from homespec.tuning.drafts import DraftTuner
from homespec.tuning.fitted import drop_unused
from homespec.tuning.measure import DISTURBED
from homespec.tuning.ngram_rates import match_rates
from homespec.tuning.notebook import Notebook, Progress
from homespec.tuning.placement import Placement
from homespec.tuning.profile import (
    SHIPPED,
    VERSION,
    Acceptance,
    FileIdentity,
    Profile,
    Switches,
    WidthPromise,
    identify,
    plain,
    profile_path,
    save_profile,
    typed,
)
from homespec.tuning.target import EXACT_WORTH, TargetTuner

_STAGES = {
    "target's kernels": 14.0,
    "target switches": 15.0,
    "target's bits": 6.0,
    "target threads": 4.0,
    "target cost": 22.0,
    "target strictly exact": 21.0,
    "texts": 12.0,
    "draft's digest": 1.0,
    f"draft {SHIPPED}": 11.0,
    "draft Q4_0": 10.0,
    "draft Q4_K": 6.0,
    "draft Q8_0": 6.0,
    "draft Q5_0": 6.0,
}


@dataclass(frozen=True, slots=True)
class TuneParams:
    """How to tune. strict: the settings of strictly exact decoding, fields of Switches.

    budget_seconds: what is repeated, is repeated as often as this allows; None: 20 to 120 by the
    target's speed. thorough: try also what takes minutes. fresh: measure anew what an interrupted
    run has measured.
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

    What was found of the target is kept before the draft is tried, and alone where that fails.
    Raises RefusedError for a target that cannot take tokens back, DiskError, OutOfMemoryError,
    ModelError, CannotRunError.
    """
    box = this_box()
    book = _notebook(target, draft, box, params, progress)
    try:
        tuner = TargetTuner(target, params.placement, book, params.budget_seconds)
        profile, texts = _measure_target(tuner, params, box, book)
        save_profile(profile, target)
        if draft is not None:
            drafts = DraftTuner(
                draft,
                params.placement,
                book,
                tuner.budget,
                target=profile.target_cost,
                readings=texts,
                thorough=params.thorough,
            )
            profile = _with_draft(profile, drafts, book)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "Interrupted. What is measured stays; the same command goes on from there."
        ) from None
    save_profile(profile.of_target_alone(), target)
    if draft is not None:
        if profile.draft is not None:
            save_profile(profile, target, draft)
        drop_unused(drafts.digest)
    book.discard()
    return profile


def _measure_target(
    tuner: TargetTuner, params: TuneParams, box: Box, book: Notebook
) -> tuple[Profile, list[Reading]]:
    """What holds of the target alone, and the texts that it read."""
    try:
        kernels = book.stage("target's kernels", tuner.kernels)
        tiled = not tiles_left_out() and (kernels["tiled"] or not leave_tiled_kernels())
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
    rates = match_rates([(text.tokens, text.start) for text in texts])
    profile = Profile(
        box=box,
        target=_identified(tuner.path),
        draft=None,
        placement=params.placement,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seconds=_rounded(book.seconds),
        tiled=tiled,
        acceptance=Acceptance(None, None, rates),
        **found,
    )
    return profile, texts


def _with_draft(alone: Profile, tuner: DraftTuner, book: Notebook) -> Profile:
    """The pair's profile; the target's own, with a note, where the draft cannot be tuned."""
    try:
        tuner.run()
    except HomespecError as exc:
        note = f"The draft was left out: {exc.message}"
        return replace(alone, seconds=_rounded(book.seconds), notes=(*alone.notes, note))
    pays = tuner.pays()
    best = tuner.best if pays else tuner.tried[0]
    return replace(
        alone,
        draft=_identified(tuner.path),
        seconds=_rounded(book.seconds),
        draft_switches=typed(Switches, best["switches"]),
        draft_cost=CostCurve.from_dict(best["curve"]),
        fitted=tuner.best_fitted if pays else None,
        draft_pays=pays,
        acceptance=Acceptance(best["greedy"], best["sampled"], alone.acceptance.ngram),
        variants=tuner.variants(),
        notes=(*alone.notes, *tuner.notes),
    )


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.items()}


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
    return found | {"notes": tuple(notes)}


def _identified(path: Path) -> FileIdentity:
    """A file's identity, with the digest by which it is known again when copied or renamed."""
    if len(shard_names(path.name)) > 1:
        return identify(path)
    return identify(path, sha256=remembered_sha256(path))
