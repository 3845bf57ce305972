"""How much memory a model takes once it is loaded and has answered, told from its header.

Every figure is the size of something llama.cpp allocates, named below, and not a fit to any one
model. What is counted is the largest it gets: the whole context full, a whole batch in a pass,
as many rows of logits as the deepest draft needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from homespec.errors import UsageError
from homespec.models import compute_size
from homespec.models.machine import DeviceMemory
from homespec.models.model_shape import Layer, ModelShape
from homespec.models.placement import ContextSettings, Placement
from homespec.models.repacking import Features, copied_bytes, copied_in_layer

RAM = "RAM"
FLOAT_BYTES = 4
# Measured: a piece or a merge rule stands in two hash maps and a list, as strings of their own.
_ENTRY_BYTES = 170
# The sampler's list of candidates: id, logit and probability of each token, and llama.cpp's ids.
_CANDIDATE_BYTES = 16
_CONTEXT_BYTES = 2 << 20  # the graph's own nodes and hash tables


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes by purpose, in one place.

    weights: as they are multiplied. file_pages: mapped pages of the file that nothing reads again
    because the weights were copied elsewhere; they are resident, and the system takes them back
    when it needs room. kv: keys, values and recurrent states. compute: the graph's intermediate
    results. output: rows of logits. other: the vocabulary and small things.
    """

    weights: int = 0
    file_pages: int = 0
    kv: int = 0
    compute: int = 0
    output: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All that is resident at the peak."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def needed(self) -> int:
        """What has to stay resident."""
        return self.total - self.file_pages

    def __add__(self, other: MemoryParts) -> MemoryParts:
        return MemoryParts(
            *(getattr(self, part.name) + getattr(other, part.name) for part in fields(self))
        )


def estimate(
    shape: ModelShape, settings: ContextSettings, placement: Placement, features: Features
) -> dict[str, MemoryParts]:
    """The bytes of a model in RAM and on each device it is placed on, by the place's name.

    Raises UsageError for an unknown cache type.
    """
    devices = placement.devices
    # Next to a device with pinned memory the CPU's layers are kept as they are.
    in_place = not settings.repack or any(device.pinned_host for device in devices)
    copying = frozenset[str]() if in_place else features
    kv = dict.fromkeys((RAM, *(device.name for device in devices)), 0)
    for layer, where in zip(shape.layers, placement.layers, strict=False):
        kv[where.name if where else RAM] += cache_bytes(layer, shape, settings)
    compute = compute_size.compute_bytes(shape, settings, placement, RAM)
    in_ram = replace(
        _ram_weights(shape, settings, placement, copying),
        kv=kv[RAM],
        compute=compute[RAM],
        output=settings.rows * shape.vocabulary * FLOAT_BYTES,
        other=shape.vocabulary_entries * _ENTRY_BYTES
        + shape.vocabulary * _CANDIDATE_BYTES
        + _CONTEXT_BYTES,
    )
    on_devices = {
        device.name: MemoryParts(
            weights=_device_weights(shape, placement, device),
            kv=kv[device.name],
            compute=compute[device.name],
        )
        for device in devices
    }
    return {RAM: in_ram, **on_devices}


def cache_bytes(layer: Layer, shape: ModelShape, settings: ContextSettings) -> int:
    """What a layer keeps of the past: keys and values of every cell, or states and snapshots.

    Sliding-window layers have as many cells as the others: without them a rollback would need
    cells that are gone.
    """
    states = 0
    if layer.recurrent:
        states = shape.state_elements * (1 + shape.snapshots(settings.snapshots))
    return states * FLOAT_BYTES + settings.cells * (
        row_bytes(layer.key_width, settings.cache_type_k)
        + row_bytes(layer.value_width, settings.cache_type_v)
    )


@lru_cache(maxsize=256)
def row_bytes(elements: int, type_name: str) -> int:
    """The bytes of so many elements of a cache type."""
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
    except KeyError as exc:
        raise UsageError(f"{type_name!r} is no cache type.") from exc
    return int(-(-elements // block) * size)


def _ram_weights(
    shape: ModelShape, settings: ContextSettings, placement: Placement, copying: Features
) -> MemoryParts:
    total, copies = sum(tensor.n_bytes for tensor in shape.input_tensors), 0
    for group, device in zip((*shape.layers, shape.output), placement.layers, strict=True):
        if device is None:
            copy, original = copied_in_layer(group, copying)
            total += group.n_bytes - original
            copies += copy
    if shape.tied_table and placement.layers[-1] is None:
        copies += copied_bytes(shape.tied_table, copying)  # else the table itself is multiplied
    pages = max(0, shape.file_bytes - total) if settings.mmap else 0
    if settings.mlock:
        return MemoryParts(weights=total + copies + pages)
    return MemoryParts(weights=total + copies, file_pages=pages)


def _device_weights(shape: ModelShape, placement: Placement, device: DeviceMemory) -> int:
    groups = zip((*shape.layers, shape.output), placement.layers, strict=True)
    total = sum(group.n_bytes for group, where in groups if where == device)
    if placement.layers[-1] == device and shape.tied_table:
        total += shape.tied_table.n_bytes
    return total
