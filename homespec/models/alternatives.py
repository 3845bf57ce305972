"""What would fit where a model does not: a smaller context or cache, fewer layers, another pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from homespec.models.fitting import (
    AUTO,
    CONTEXTS,
    PlanRequest,
    chosen_devices,
    fit_draft,
    fit_target,
    fits,
)
from homespec.models.gguf_header import Header
from homespec.models.machine import Machine
from homespec.models.memory_estimate import RAM, MemoryParts
from homespec.models.model_shape import ModelShape, model_shape

_CACHE_TYPES = ("q8_0", "q4_0")
_MOST_PAIRS = 3
# For files whose header is not at hand: what models of 0.1 to 14 billion weights take at a context
# of 4096, cache and buffers included; those with uncommonly large caches take more.
_ROUGH_SHARE, _ROUGH_BYTES = 1.25, 160 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another model, perhaps with a draft: by their headers, or by their files' sizes alone.

    name: what one would have to type for it. same_model: another quantization of the target.
    """

    name: str
    target: Header | None = None
    draft: Header | None = None
    target_bytes: int = 0
    draft_bytes: int = 0
    same_model: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that would fit. arguments: the flags or the name that ask for it."""

    kind: Literal["context", "cache", "layers", "mapping", "quantization", "pair"]
    arguments: str
    text: str


def alternatives(
    shape: ModelShape,
    request: PlanRequest,
    machine: Machine,
    candidates: Iterable[Candidate] = (),
) -> tuple[Alternative, ...]:
    """Each way that fits by itself, the least change first; then other models."""
    found = [
        *_contexts(shape, request, machine),
        *_caches(shape, request, machine),
        *_layers(shape, request, machine),
        *_mapping(shape, request, machine),
        *_models(request, machine, candidates),
    ]
    return tuple(found)


def _contexts(shape: ModelShape, request: PlanRequest, machine: Machine) -> Iterator[Alternative]:
    asked = request.n_ctx or shape.context_length
    for n_ctx in (context for context in CONTEXTS if context < asked):
        if fit_target(shape, replace(request, n_ctx=n_ctx), machine):
            yield Alternative("context", f"-c {n_ctx}", f"a context of {n_ctx} tokens (-c {n_ctx})")
            return


def _caches(shape: ModelShape, request: PlanRequest, machine: Machine) -> Iterator[Alternative]:
    if request.flash_attention == "off":  # a quantized V cache needs it
        return
    for kind in _CACHE_TYPES:
        if kind in (request.cache_type_k, request.cache_type_v):
            continue
        if fit_target(shape, replace(request, cache_type_k=kind, cache_type_v=kind), machine):
            flags = f"-ctk {kind} -ctv {kind}"
            yield Alternative("cache", flags, f"a {kind} cache ({flags})")
            return


def _layers(shape: ModelShape, request: PlanRequest, machine: Machine) -> Iterator[Alternative]:
    if request.gpu_layers == AUTO or not chosen_devices(request.devices, machine):
        return
    placed = fit_target(shape, replace(request, gpu_layers=AUTO), machine)
    if placed:
        count = placed.placement.gpu_layers
        yield Alternative("layers", f"-ngl {count}", f"{count} layers on devices (-ngl {count})")


def _mapping(shape: ModelShape, request: PlanRequest, machine: Machine) -> Iterator[Alternative]:
    if request.mmap and fit_target(shape, replace(request, mmap=False), machine):
        yield Alternative(
            "mapping", "--no-mmap", "reading the file instead of mapping it (--no-mmap)"
        )


def _models(
    request: PlanRequest, machine: Machine, candidates: Iterable[Candidate]
) -> Iterator[Alternative]:
    """The largest ones that fit, with the context asked for or the largest below."""
    count = 0
    for candidate in sorted(candidates, key=_size, reverse=True):
        n_ctx = _candidate_context(candidate, request, machine)
        if n_ctx is None:
            continue
        smaller = "" if n_ctx == request.n_ctx else f" -c {n_ctx}"
        kind: Literal["quantization", "pair"] = "quantization" if candidate.same_model else "pair"
        yield Alternative(kind, candidate.name + smaller, candidate.name + smaller)
        count += 1
        if count == _MOST_PAIRS:
            return


def _size(candidate: Candidate) -> int:
    return candidate.target.file_size if candidate.target else candidate.target_bytes


def _candidate_context(candidate: Candidate, request: PlanRequest, machine: Machine) -> int | None:
    if candidate.target is None:
        return request.n_ctx if _fits_roughly(candidate, request, machine) else None
    shape = model_shape(candidate.target)
    draft = model_shape(candidate.draft) if candidate.draft else None
    for n_ctx in (request.n_ctx, *(context for context in CONTEXTS if context < request.n_ctx)):
        wanted = replace(request, n_ctx=n_ctx, gpu_layers=AUTO)
        placed = fit_target(shape, wanted, machine)
        if placed and (draft is None or fit_draft(draft, placed, wanted, machine)):
            return placed.settings.n_ctx
    return None


def _fits_roughly(candidate: Candidate, request: PlanRequest, machine: Machine) -> bool:
    """Whether files of this size fit in RAM, or whole on a device."""
    if not candidate.target_bytes:
        return False
    size = candidate.target_bytes + candidate.draft_bytes
    files = 2 if candidate.draft_bytes else 1
    needed = int(size * _ROUGH_SHARE) + files * _ROUGH_BYTES
    parts = {RAM: MemoryParts(weights=needed, file_pages=size // 2)}
    if fits(parts, machine, request):
        return True
    return any(
        fits(
            {RAM: MemoryParts(weights=_ROUGH_BYTES), device.name: MemoryParts(weights=needed)},
            machine,
            request,
        )
        for device in chosen_devices(request.devices, machine)
    )
