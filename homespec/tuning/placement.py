"""Where the models of a pair lie while they are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homespec.llama.model import ALL_LAYERS, Model


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the models lie: fields of LoadParams."""

    gpu_layers: int = ALL_LAYERS
    devices: tuple[str, ...] | None = None
    draft_gpu_layers: int = ALL_LAYERS
    draft_devices: tuple[str, ...] | None = None

    def load(self, target: Path, *, repack: bool = True) -> Model:
        """The target's weights there."""
        devices = list(self.devices) if self.devices else None
        return Model(target, gpu_layers=self.gpu_layers, devices=devices, repack=repack)

    def load_draft(self, draft: Path) -> Model:
        """A draft's weights there."""
        devices = list(self.draft_devices) if self.draft_devices else None
        return Model(draft, gpu_layers=self.draft_gpu_layers, devices=devices)
