"""The pairs of the catalogue: which fit this machine, which are here."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from homespec.errors import HomespecError, LibraryError, UsageError
from homespec.models import sources
from homespec.models.catalog import ModelFile, Pair, load_catalog
from homespec.models.default_pair import load_default
from homespec.models.fitting import PlanRequest, Use, tightest, uses
from homespec.models.machine import Machine, read_machine
from homespec.models.memory_estimate import RAM, MemoryParts
from homespec.models.memory_plan import propose
from homespec.models.pairs import Name, missing_parts, with_drafts_here
from homespec.models.plan_words import size
from homespec.planning import local_header, this_machine

# A file whose header is not at hand: what models of 0.1 to 14 billion weights take at a context
# of 4096, on the safe side of all but those with the largest caches.
_ROUGH_SHARE, _ROUGH_BYTES = 1.5, 192 << 20
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a pair fits a machine: `fits`, `reduced` (its draft does not) or `refused`.

    reason: the plan's sentence, or a clause where it is `estimated` from the files' sizes alone
    because they are not here.
    """

    verdict: Literal["fits", "reduced", "refused"]
    reason: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A pair and what this machine has to say of it.

    suits: whether this machine has the hardware it is meant for. downloaded: `yes`, `target` (its
    draft is missing), `partly` (to be gone on with) or `no`.
    """

    pair: Pair
    fit: Fit
    suits: bool
    downloaded: Literal["yes", "target", "partly", "no"]
    is_default: bool

    @property
    def size_bytes(self) -> int | None:
        """Bytes of both files, where they are known."""
        sizes = [sources.size(file.source) for file in (self.pair.target, self.pair.draft) if file]
        return None if None in sizes else sum(one or 0 for one in sizes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        pair = self.pair
        return {
            "name": pair.name,
            "target": _file_as_dict(pair.target),
            "drafts": [_file_as_dict(draft) for draft in pair.drafts],
            "size_bytes": self.size_bytes,
            "min_memory_gb": pair.min_memory_gb,
            "hardware": list(pair.hardware),
            "seen": pair.seen,
            "evidence": pair.evidence,
            "notes": pair.notes,
            "fit": asdict(self.fit),
            "suits": self.suits,
            "downloaded": self.downloaded,
            "is_default": self.is_default,
        }


def list_pairs(catalog: Name | None = None, machine: Machine | None = None) -> list[Entry]:
    """The whole catalogue, in its order. Raises UsageError for a catalogue with mistakes."""
    machine = machine or machine_or_ram()
    default = None
    with contextlib.suppress(UsageError):  # a default that cannot be read is no pair's
        default = load_default()
    hardware = "gpu" if machine.offload_devices else "cpu"
    return [
        Entry(
            pair,
            fit(with_drafts_here(pair), machine),
            hardware in pair.hardware,
            _downloaded(with_drafts_here(pair)),
            default is not None and _same(pair, default),
        )
        for pair in load_catalog(catalog).pairs.values()
    ]


def machine_or_ram() -> Machine:
    """This machine; without its devices where llama.cpp does not run here."""
    try:
        return this_machine()
    except LibraryError:
        return read_machine()


def fit(pair: Pair, machine: Machine, request: PlanRequest | None = None) -> Fit:
    """Whether a pair fits: planned from headers where the files are here, else from sizes."""
    request = request or PlanRequest()
    if not missing_parts(pair):
        try:
            target, *drafts = [local_header(path) for path in _paths(pair)]
            plan = propose(target, drafts, request, machine)
        except HomespecError as exc:
            return Fit("refused", exc.message)
        return Fit(plan.verdict, plan.sentence)
    return _rough_fit(pair, machine, request)


def _rough_fit(pair: Pair, machine: Machine, request: PlanRequest) -> Fit:
    target, both = _rough_bytes(pair.target), _rough_bytes(pair.target, *pair.drafts[:1])
    if both is None or target is None:
        needed = (pair.min_memory_gb or 0) * _GB
        if not needed:
            return Fit("fits", "its size is not known", estimated=True)
        totals = [machine.ram_total_bytes, *(one.total_bytes for one in machine.offload_devices)]
        # 8 GB of memory are a little less than that to the system
        fits = max(totals) >= 0.9 * needed
        said = f"is meant for {pair.min_memory_gb} GB"
        return Fit("fits" if fits else "refused", said, estimated=True)
    lacking = _lacking(both, machine, request)
    if lacking is None:
        return Fit("fits", f"needs about {size(both)}", estimated=True)
    without = _lacking(target, machine, request)
    if without is None:
        said = f"with its draft it needs about {size(both)}"
        return Fit("reduced", said, estimated=True)
    room = max(0, without.free_bytes - without.reserve_bytes)
    said = f"needs about {size(target)}, and {without.place} has room for {size(room)}"
    return Fit("refused", said, estimated=True)


def _rough_bytes(*files: ModelFile) -> int | None:
    sizes = [sources.size(file.source) for file in files]
    if None in sizes:
        return None
    return sum(int((one or 0) * _ROUGH_SHARE) + _ROUGH_BYTES for one in sizes)


def _lacking(needed: int, machine: Machine, request: PlanRequest) -> Use | None:
    """The limit that is too small for so many bytes; None where RAM or a device holds them."""
    places = [{RAM: MemoryParts(weights=needed)}]
    places += [
        {RAM: MemoryParts(weights=_ROUGH_BYTES), device.name: MemoryParts(weights=needed)}
        for device in machine.offload_devices
    ]
    worst = [tightest(uses(parts, machine, request)) for parts in places]
    lacking = [use for use in worst if use is not None and use.missing_bytes > 0]
    if len(lacking) < len(worst):
        return None
    return min(lacking, key=lambda use: use.missing_bytes)


def _downloaded(pair: Pair) -> Literal["yes", "target", "partly", "no"]:
    if not missing_parts(pair):
        return "yes"
    if sources.locate(pair.target.source):
        return "target"
    files = [file.source for file in (pair.target, pair.draft) if file]
    return "partly" if any(sources.removable_bytes(file) for file in files) else "no"


def _paths(pair: Pair) -> list[Path]:
    found = [sources.locate(file.source) for file in (pair.target, pair.draft) if file]
    return [path for path in found if path]


def _same(one: Pair, other: Pair) -> bool:
    return one.name == other.name and one.target.source == other.target.source


def _file_as_dict(file: ModelFile) -> dict[str, Any]:
    path = sources.locate(file.source)
    return {
        "name": file.name,
        "source": str(file.source),
        "size_bytes": sources.size(file.source),
        "sha256": file.sha256,
        "licence": file.licence,
        "context_length": file.context_length,
        "path": str(path) if path else None,
    }
