"""How a model is to be loaded, and where its layers lie then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from homespec.models.machine import DeviceMemory

_CELLS = 256  # llama.cpp rounds a context up to so many cells


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How a model is loaded and its context made; the fields are those of the engine."""

    n_ctx: int = 4096
    n_batch: int = 512
    max_rows: int = 33
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: str = "auto"
    snapshots: int = 0
    mmap: bool = True
    mlock: bool = False
    repack: bool = True

    @property
    def cells(self) -> int:
        """The tokens the cache has room for."""
        return -(-self.n_ctx // _CELLS) * _CELLS

    @property
    def batch(self) -> int:
        """The tokens of one pass."""
        return min(self.n_batch, self.n_ctx)

    @property
    def rows(self) -> int:
        """The most rows of logits of one pass."""
        return min(self.max_rows, self.batch)

    @property
    def uses_flash_attention(self) -> bool:
        """`auto` takes it wherever it runs, which is everywhere today."""
        return self.flash_attention != "off"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each layer lies; the last entry is the output layer's, None means RAM."""

    layers: tuple[DeviceMemory | None, ...]

    @property
    def devices(self) -> tuple[DeviceMemory, ...]:
        """The devices that hold something, in order."""
        return tuple(dict.fromkeys(device for device in self.layers if device))

    @property
    def gpu_layers(self) -> int:
        """llama.cpp's count of offloaded layers, the output layer included."""
        return sum(device is not None for device in self.layers)


@lru_cache(maxsize=1024)  # a plan tries the same ones for every context
def place_layers(num_layers: int, gpu_layers: int, devices: tuple[DeviceMemory, ...]) -> Placement:
    """Where llama.cpp puts the layers: the last `gpu_layers` of them, split by free memory."""
    count = min(gpu_layers, num_layers + 1) if devices else 0
    first = num_layers + 1 - count
    total = sum(device.free_bytes for device in devices)
    reached = list(accumulate(device.free_bytes for device in devices))
    bounds = [free / total if total else 1.0 for free in reached]

    def device_of(index: int) -> DeviceMemory | None:
        if index < first:
            return None
        share = (index - first) / count
        # The first device whose bound lies above the share, as std::upper_bound finds it.
        return next(
            (device for device, end in zip(devices, bounds, strict=True) if end > share),
            devices[-1],
        )

    return Placement(tuple(device_of(index) for index in range(num_layers + 1)))
