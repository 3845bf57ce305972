"""Whether and where a model fits: settings and placements tried against the room there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from homespec.errors import UsageError
from homespec.models.machine import DeviceMemory, Machine
from homespec.models.memory_estimate import RAM, MemoryParts, estimate
from homespec.models.model_shape import ModelShape
from homespec.models.placement import ContextSettings, Placement, place_layers

AUTO = -1
# Contexts tried where none was asked for; the model's own comes before them.
CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
_USUAL_CONTEXT = 4096
# Address space that is reserved and never touched: heaps of threads, llama.cpp's graphs.
_UNTOUCHED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for. The fields named as the engine's mean the same.

    n_ctx: 0 for as much of the model's own context as fits. cache_type_k, cache_type_v: None for
    f16, or q8_0 where only that fits. gpu_layers: AUTO for as many as fit. drafting: None for the
    best that fits, `ngram` or `none` to leave the drafts out. reserve_bytes,
    device_reserve_bytes: what stays free in RAM and on each device, None for the default.
    """

    n_ctx: int = _USUAL_CONTEXT
    n_batch: int = 512
    gpu_layers: int = AUTO
    draft_gpu_layers: int = AUTO
    devices: tuple[str, ...] | None = None
    draft_devices: tuple[str, ...] | None = None
    flash_attention: str = "auto"
    cache_type_k: str | None = "f16"
    cache_type_v: str | None = "f16"
    draft_flash_attention: str = "auto"
    draft_cache_type_k: str = "f16"
    draft_cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    repack: bool = True
    max_draft_depth: int = 32
    drafting: str | None = None
    reserve_bytes: int | None = None
    device_reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A model with its settings, where its layers lie, and the bytes it takes there."""

    shape: ModelShape
    settings: ContextSettings
    placement: Placement
    parts: Mapping[str, MemoryParts]


@dataclass(frozen=True, slots=True)
class Use:
    """What is taken of one limit or device, and what there is."""

    place: str
    needed_bytes: int
    total_bytes: int
    free_bytes: int
    reserve_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How much too little there is; at most 0 where it fits."""
        return self.needed_bytes + self.reserve_bytes - self.free_bytes


def add_parts(*models: Mapping[str, MemoryParts]) -> dict[str, MemoryParts]:
    """What several models take together, by place."""
    sums: dict[str, MemoryParts] = {RAM: MemoryParts()}
    for parts in models:
        for place, more in parts.items():
            sums[place] = sums.get(place, MemoryParts()) + more
    return sums


def uses(
    parts: Mapping[str, MemoryParts], machine: Machine, request: PlanRequest
) -> tuple[Use, ...]:
    """Each limit and each device, and what these bytes take of it."""
    by_name = {device.name: device for device in machine.devices}
    shared = sum(
        parts[name].needed for name, device in by_name.items() if device.unified and name in parts
    )
    found = []
    for limit in machine.limits:
        needed = parts[RAM].needed + shared
        if limit.kind == "process":
            needed = parts[RAM].total + shared + _UNTOUCHED_BYTES
        asked = request.reserve_bytes
        reserve = limit.default_reserve_bytes if asked is None else asked
        found.append(Use(limit.label, needed, limit.total_bytes, limit.free_bytes, reserve))
    for name in (name for name in parts if name != RAM):
        device, asked = by_name[name], request.device_reserve_bytes
        reserve = device.default_reserve_bytes if asked is None else asked
        needed = parts[name].needed
        found.append(Use(name, needed, device.total_bytes, device.free_bytes, reserve))
    return tuple(found)


def tightest(found: Iterable[Use]) -> Use | None:
    """The use with the least to spare."""
    return max(found, key=lambda use: use.missing_bytes, default=None)


def fits(parts: Mapping[str, MemoryParts], machine: Machine, request: PlanRequest) -> bool:
    """Whether every limit and device holds them."""
    return all(use.missing_bytes <= 0 for use in uses(parts, machine, request))


def fit_target(shape: ModelShape, request: PlanRequest, machine: Machine) -> Placed | None:
    """The target as asked for, with as many layers on devices as fit; None where it does not fit.

    A context that was not asked for never pushes a layer off a device.
    """
    for types in _cache_types(request):
        wanted = replace(request, cache_type_k=types[0], cache_type_v=types[1])
        if request.n_ctx:
            placed = _fit_layers(shape, target_settings(shape, wanted), wanted, machine)
        else:
            placed = _fit_context(shape, wanted, machine)
        if placed:
            return placed
    return None


def fit_draft(
    shape: ModelShape, target: Placed, request: PlanRequest, machine: Machine
) -> Placed | None:
    """The draft beside a placed target: whole on the device with the most room, else in RAM."""
    settings = draft_settings(shape, target, request)
    for placement in _draft_placements(shape, target, request, machine):
        parts = estimate(shape, settings, placement, machine.cpu_features)
        if fits(add_parts(target.parts, parts), machine, request):
            return Placed(shape, settings, placement, parts)
    return None


def smallest_draft(
    shape: ModelShape, target: Placed, request: PlanRequest, machine: Machine
) -> Placed:
    """The draft where it lacks the least, fitting or not: what a refusal is told with."""
    settings = draft_settings(shape, target, request)

    def missing(placed: Placed) -> int:
        both = uses(add_parts(target.parts, placed.parts), machine, request)
        return max((use.missing_bytes for use in both), default=0)

    tried = (
        Placed(shape, settings, place, estimate(shape, settings, place, machine.cpu_features))
        for place in _draft_placements(shape, target, request, machine)
    )
    return min(tried, key=missing)


def smallest_target(shape: ModelShape, request: PlanRequest, machine: Machine) -> Placed:
    """The target where it lacks the least, fitting or not."""
    wanted = replace(request, n_ctx=request.n_ctx or min(_USUAL_CONTEXT, shape.context_length))
    settings = target_settings(shape, wanted)

    def missing(placed: Placed) -> int:
        return max((use.missing_bytes for use in uses(placed.parts, machine, request)), default=0)

    return min(_placements(shape, settings, wanted, machine), key=missing)


def target_settings(shape: ModelShape, request: PlanRequest) -> ContextSettings:
    """How the target is loaded."""
    return ContextSettings(
        n_ctx=request.n_ctx or shape.context_length,
        n_batch=request.n_batch,
        max_rows=request.max_draft_depth + 1,
        cache_type_k=request.cache_type_k or "f16",
        cache_type_v=request.cache_type_v or "f16",
        flash_attention=request.flash_attention,
        snapshots=request.max_draft_depth + 1 if shape.recurrent else 0,
        mmap=request.mmap,
        mlock=request.mlock,
        repack=request.repack,
    )


def draft_settings(shape: ModelShape, target: Placed, request: PlanRequest) -> ContextSettings:
    """How a draft is loaded: as long a context as the target's, one row of logits."""
    return replace(
        target.settings,
        max_rows=1,
        cache_type_k=request.draft_cache_type_k,
        cache_type_v=request.draft_cache_type_v,
        flash_attention=request.draft_flash_attention,
        snapshots=request.max_draft_depth + 1 if shape.recurrent else 0,
        repack=True,
    )


def chosen_devices(names: Sequence[str] | None, machine: Machine) -> tuple[DeviceMemory, ...]:
    """The devices of these names in their order, or those llama.cpp takes by itself."""
    if names is None:
        return machine.offload_devices
    by_name = {device.name.lower(): device for device in machine.devices}
    for name in names:
        if name.lower() not in by_name:
            known = ", ".join(device.name for device in machine.devices) or "none"
            raise UsageError(f"There is no device {name!r}.", hint=f"Devices here: {known}.")
    return tuple(by_name[name.lower()] for name in names)


def _cache_types(request: PlanRequest) -> Iterator[tuple[str, str]]:
    for default in ("f16", "q8_0"):
        yield request.cache_type_k or default, request.cache_type_v or default
        if request.cache_type_k and request.cache_type_v:
            return


def _fit_context(shape: ModelShape, request: PlanRequest, machine: Machine) -> Placed | None:
    def fit(n_ctx: int) -> Placed | None:
        wanted = replace(request, n_ctx=n_ctx)
        return _fit_layers(shape, target_settings(shape, wanted), wanted, machine)

    own = shape.context_length
    usual = fit(min(own, _USUAL_CONTEXT))
    for n_ctx in (own, *(context for context in CONTEXTS if context < own)):
        if usual and n_ctx <= usual.settings.n_ctx:
            return usual
        placed = fit(n_ctx)
        least = usual.placement.gpu_layers if usual else 0
        if placed and placed.placement.gpu_layers >= least:
            return placed
    return None


def _fit_layers(
    shape: ModelShape, settings: ContextSettings, request: PlanRequest, machine: Machine
) -> Placed | None:
    return next(
        (
            placed
            for placed in _placements(shape, settings, request, machine)
            if fits(placed.parts, machine, request)
        ),
        None,
    )


def _placements(
    shape: ModelShape, settings: ContextSettings, request: PlanRequest, machine: Machine
) -> Iterator[Placed]:
    """The target with ever fewer layers on devices, or with just as many as were asked for."""
    devices, every = chosen_devices(request.devices, machine), len(shape.layers) + 1
    counts: Iterable[int] = [min(request.gpu_layers, every) if devices else 0]
    if request.gpu_layers == AUTO:
        counts = range(every if devices else 0, -1, -1)
    for count in counts:
        placement = place_layers(len(shape.layers), count, devices)
        parts = estimate(shape, settings, placement, machine.cpu_features)
        yield Placed(shape, settings, placement, parts)


def _draft_placements(
    shape: ModelShape, target: Placed, request: PlanRequest, machine: Machine
) -> Iterator[Placement]:
    devices, layers = chosen_devices(request.draft_devices, machine), len(shape.layers)

    def room(device: DeviceMemory) -> int:
        taken = target.parts.get(device.name, MemoryParts()).needed
        return device.room(request.device_reserve_bytes) - taken

    count = layers + 1 if request.draft_gpu_layers == AUTO else request.draft_gpu_layers
    if count:
        for device in sorted(devices, key=room, reverse=True):
            yield place_layers(layers, count, (device,))
    if not count or not devices or request.draft_gpu_layers == AUTO:
        yield place_layers(layers, 0, ())
