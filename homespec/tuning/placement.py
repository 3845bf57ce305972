"""Where the models of a pair lie while they are measured, and whether a load puts them there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homespec.llama.model import ALL_LAYERS, Model
from homespec.models.memory_plan import ModelPlan, Plan

_ALIKE = 8  # a share of the layers, as divisor: so many more or less cost about the same


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the models lie: fields of LoadParams."""

    gpu_layers: int = ALL_LAYERS
    devices: tuple[str, ...] | None = None
    draft_gpu_layers: int = ALL_LAYERS
    draft_devices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, plan: Plan) -> Placement:
        """Where the plan puts them."""
        draft = plan.draft
        return cls(
            plan.target.gpu_layers,
            plan.target.devices or None,
            draft.gpu_layers if draft else 0,
            (draft.devices or None) if draft else None,
        )

    def difference(self, plan: Plan, *, with_draft: bool) -> str:
        """How the plan puts them elsewhere, in words; "" where it does not, or hardly."""
        difference = _difference("target", self.gpu_layers, self.devices, plan.target)
        if difference or not with_draft:
            return difference
        if plan.draft is None:
            return "it was tuned with a draft, for which there is no room"
        return _difference("draft", self.draft_gpu_layers, self.draft_devices, plan.draft)

    def load(self, target: Path, *, repack: bool = True) -> Model:
        """The target's weights there."""
        devices = list(self.devices) if self.devices else None
        return Model(target, gpu_layers=self.gpu_layers, devices=devices, repack=repack)

    def load_draft(self, draft: Path) -> Model:
        """A draft's weights there."""
        devices = list(self.draft_devices) if self.draft_devices else None
        return Model(draft, gpu_layers=self.draft_gpu_layers, devices=devices)


def _difference(what: str, layers: int, devices: tuple[str, ...] | None, now: ModelPlan) -> str:
    alike = abs(layers - now.gpu_layers) <= now.layer_count // _ALIKE
    if (devices or ()) == now.devices and alike:
        return ""
    then = place_words(layers, devices)
    return f"it was tuned with the {what} {then}, not {place_words(now.gpu_layers, now.devices)}"


def place_words(layers: int, devices: tuple[str, ...] | None) -> str:
    """In RAM, or how many layers lie on which devices."""
    if not layers or not devices:
        return "in RAM"
    return f"with {layers} layer{'s' if layers > 1 else ''} on {' and '.join(devices)}"
