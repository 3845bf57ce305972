"""The memory plan for this machine: what llama.cpp tells of it, and what is asked for, joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path, PurePosixPath

from homespec.errors import HomespecError
from homespec.llama.devices import Device, devices
from homespec.llama.library import build_features, own_kernels_pay
from homespec.models import quants, sources
from homespec.models.alternatives import Candidate
from homespec.models.catalog import Catalog, ModelFile
from homespec.models.gguf_header import Header, join_shards, read_header
from homespec.models.kernels import own_kernels_serve
from homespec.models.machine import DeviceMemory, Machine, read_machine
from homespec.models.memory_plan import Plan, PlanRequest, plan
from homespec.models.references import shard_names

_NO_PINNED_MEMORY = ("MTL", "Metal", "RPC")
_F16_ATTENTION = ("CUDA", "ROCm", "MUSA")  # one code for all three


def this_machine() -> Machine:
    """RAM, limits and devices as they are now. Raises LibraryError."""
    memory = tuple(_device_memory(device) for device in devices() if device.offloads)
    return read_machine(memory, frozenset(build_features().get("CPU", ())))


def request_for(
    params: object,
    *,
    drafting: str | None = None,
    reserve_bytes: int | None = None,
    device_reserve_bytes: int | None = None,
) -> PlanRequest:
    """What the engine's LoadParams ask of a plan: the fields that both have."""
    common = {
        field.name: getattr(params, field.name)
        for field in fields(PlanRequest)
        if hasattr(params, field.name)
    }
    more = {
        "drafting": drafting,
        "reserve_bytes": reserve_bytes,
        "device_reserve_bytes": device_reserve_bytes,
    }
    return PlanRequest(**{**common, **more})


def suits_own_kernels(header: Header) -> bool:
    """Whether a model that was not tuned is best left in its file's layout for these kernels."""
    return own_kernels_pay() and own_kernels_serve(header.tensors)


def plan_for(
    target: Header,
    drafts: Sequence[Header],
    request: PlanRequest,
    *,
    machine: Machine | None = None,
    catalog: Catalog | None = None,
) -> Plan:
    """The plan for a target and its drafts on this machine (or on the one given).

    catalog: where other models are looked for, should the target not fit. Raises PlanError then.
    """
    others = candidates(catalog, target) if catalog else ()
    return plan(target, drafts, request, machine or this_machine(), others)


def candidates(catalog: Catalog, target: Header) -> Iterator[Candidate]:
    """The catalogue's pairs, and its other quantizations of the target.

    Those that are on this machine come with their headers; the others with their files' sizes.
    """
    own = PurePosixPath(target.source).name.lower()
    for pair in catalog.pairs.values():
        if pair.target.source.name.lower() != own:
            yield _candidate(pair.name, pair.target, pair.draft)
    named = {pair.target.name for pair in catalog.pairs.values()}
    for file in catalog.files.values():
        name = file.source.name.lower()
        if name != own and _stem(name) == _stem(own) and file.name not in named:
            yield _candidate(file.name, file, None, same_model=True)


def local_header(path: Path) -> Header:
    """The header of a model on this machine, its shards joined."""
    shards = [read_header(path.with_name(name)) for name in shard_names(path.name)]
    return join_shards(shards)


def _candidate(
    name: str, target: ModelFile, draft: ModelFile | None, *, same_model: bool = False
) -> Candidate:
    return Candidate(
        name,
        _header_here(target),
        _header_here(draft) if draft else None,
        target.size_bytes or 0,
        (draft.size_bytes or 0) if draft else 0,
        same_model,
    )


def _header_here(file: ModelFile) -> Header | None:
    try:
        path = sources.locate(file.source)
        return local_header(path) if path else None
    except HomespecError:
        return None  # a broken file is no candidate by its header


def _stem(name: str) -> str:
    """A file's name without its quantization."""
    quant = quants.quant_of(name)
    stem = name.removesuffix(".gguf")
    return stem[: -len(quant)] if quant and stem.endswith(quant.lower()) else stem


def _device_memory(device: Device) -> DeviceMemory:
    metal = device.name.startswith(("MTL", "Metal"))
    return DeviceMemory(
        device.name,
        device.total_bytes,
        device.free_bytes,
        kind=device.kind,
        unified=metal or device.kind == "igpu",
        pinned_host=not device.name.startswith(_NO_PINNED_MEMORY),
        f16_attention=device.name.startswith(_F16_ATTENTION),
    )
