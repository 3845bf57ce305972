"""The machine and the library that a profile holds for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from homespec.llama.devices import cpu_features, cpu_name, devices, num_threads
from homespec.llama.library import build_id, version


@dataclass(frozen=True, slots=True)
class Box:
    """The machine and the library that a profile holds for."""

    cpu: str
    cpu_features: tuple[str, ...]  # as the system names them
    cores: int  # physical ones this process may use
    devices: tuple[str, ...]  # descriptions of those that layers can be placed on
    library: str  # llama-cpp-python's version
    build: str = ""  # what tells one build of that version from another

    @property
    def machine(self) -> str:
        """A name for the machine alone, without the library."""
        facts = (self.cpu, self.cpu_features, self.cores, self.devices)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def this_box() -> Box:
    """The machine and the library as they are now."""
    offload = tuple(device.description for device in devices() if device.offloads)
    features = tuple(cpu_features())
    return Box(cpu_name(), features, num_threads(), offload, version(), build_id())
