"""Brings the files of a pair here as planned: what cannot be used is told before its gigabytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from homespec.checking import DraftReport, Report, check_pair
from homespec.errors import NetworkError, NoRangesError
from homespec.loading import STRICT_EXACT, LoadParams
from homespec.models import sources
from homespec.models.catalog import Pair, load_catalog
from homespec.models.memory_plan import PlanRequest, require
from homespec.models.pairs import fetch_pair, missing_parts, with_drafts_here
from homespec.models.references import Progress, WheelMember
from homespec.models.tokenizer_check import require_compatible
from homespec.planning import request_for

logger = logging.getLogger(__name__)


def params_for(pair: Pair, options: Mapping[str, Any]) -> LoadParams:
    """The fields of LoadParams that were asked for, with the context the pair was set up with."""
    usual = {} if pair.n_ctx is None else {"n_ctx": pair.n_ctx}
    return LoadParams(**{**usual, **options})


def plan_request(params: LoadParams) -> PlanRequest:
    """What a load with these asks of the memory plan."""
    if params.strict_exact:
        params = replace(params, **STRICT_EXACT)
    return request_for(params, reserve_bytes=params.reserve_bytes)


def fetch_planned(
    pair: Pair,
    params: LoadParams,
    *,
    needs_draft: bool = False,
    progress: Progress | None = None,
    offline: bool = False,
) -> tuple[Path, Path | None]:
    """The target and the one draft that is to be loaded with it, on this machine and verified.

    A target and a draft that are here are taken, and no network is asked. Else headers are read
    first, and the draft that is fetched is the first one with room beside the target. A target
    that is here goes without a draft that cannot be reached, but with needs_draft. Raises
    PlanError or IncompatiblePairError before any download, and what fetching raises.
    """
    try:
        chosen = _chosen(pair, params, progress, offline)
    except NetworkError as exc:
        if needs_draft or not sources.locate(pair.target.source):
            raise
        logger.warning("%s N-grams draft instead.", exc.message)
        chosen = replace(pair, drafts=())
    return fetch_pair(chosen, progress=progress, offline=offline)


def _chosen(pair: Pair, params: LoadParams, progress: Progress | None, offline: bool) -> Pair:
    if sources.locate(pair.target.source):
        pair = with_drafts_here(pair)
        if len(pair.drafts) < 2 and not missing_parts(pair):
            return pair  # loading plans it
    elif offline or isinstance(pair.target.source, WheelMember):
        return pair  # nothing to read a header from
    try:
        report = check_pair(
            pair,
            plan_request(params),
            load_catalog(),
            offline=offline,
            tuned=params.tuned,
            progress=progress,
        )
    except NoRangesError:
        return pair
    if report.drafts_fail and pair.draft:
        found = report.drafts[0].compatibility
        require_compatible(pair.draft.source.name, pair.target.source.name, found)
    require(report.plan)
    if report.plan.verdict == "reduced":
        logger.warning("%s", report.plan.sentence)
    return as_planned(pair, report, lambda text: logger.warning("%s", text))


def as_planned(pair: Pair, report: Report, tell: Callable[[str], object]) -> Pair:
    """The pair with the one draft that fits the target and the memory, or with none.

    tell: hears of each draft that is none for this target.
    """
    planned, chosen = report.plan.draft, []
    for draft, file in zip(report.drafts, pair.drafts, strict=True):
        if draft.compatibility.verdict == "incompatible":
            reason = draft.compatibility.reason
            tell(f"{file.name} cannot draft for {pair.target.name}: {reason}.")
        elif planned and planned.name in (file.source.name, _copy_name(draft)):
            chosen.append(file)
    return replace(pair, drafts=tuple(chosen[:1]))


def _copy_name(draft: DraftReport) -> str:
    return Path(draft.fitted.source).name if draft.fitted else ""
