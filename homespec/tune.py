"""Tunes the pair that somebody means: found, checked and placed as the engine would do it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from homespec.engine import STRICT_EXACT, LoadParams
from homespec.errors import HomespecError
from homespec.models import sources
from homespec.models.catalog import Pair
from homespec.models.gguf_header import Header
from homespec.models.pairs import with_drafts_here
from homespec.models.text_model import require_text_model
from homespec.models.tokenizer_check import check_tokenizers, require_compatible
from homespec.planning import local_header, plan_for, request_for
from homespec.tuning.notebook import Progress
from homespec.tuning.placement import Placement
from homespec.tuning.profile import Profile, load_profile, load_target_profile
from homespec.tuning.tune import TuneParams, tune


def tune_pair(
    target: Path,
    draft: Path | None,
    params: TuneParams | None = None,
    progress: Progress | None = None,
    *,
    load: LoadParams | None = None,
) -> Profile:
    """Measure a pair where the memory plan puts it, and keep the profile.

    load: how it is going to be loaded. Raises as the engine's load, and as
    `homespec.tuning.tune.tune`.
    """
    header = _header(target)
    drafts = []
    if draft is not None:
        drafts = [_header(draft)]
        require_compatible(draft.name, target.name, check_tokenizers(header, drafts[0]))
    plan = plan_for(header, drafts, request_for(load or LoadParams()))
    placement = Placement.of(plan)
    params = replace(params or TuneParams(), strict=STRICT_EXACT, placement=placement)
    return tune(target, draft if plan.draft else None, params, progress)


def profile_of(pair: Pair) -> Profile:
    """The profile of a pair that is on this machine, else that of its target alone.

    Raises HomespecError where none holds.
    """
    reason = "it is not downloaded"
    target, file = sources.locate(pair.target.source), with_drafts_here(pair).draft
    if target is not None:
        draft = sources.locate(file.source) if file else None  # None too where it had no room
        profile, reason = load_profile(target, draft)
        profile = profile or load_target_profile(target)
        if profile is not None:
            return profile
    raise HomespecError(
        f"There is no profile of {pair.name} that holds: {reason}.",
        hint="Measure it: homespec tune",
    )


def _header(path: Path) -> Header:
    header = local_header(path)
    require_text_model(header)
    return header
