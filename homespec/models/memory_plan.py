"""The memory plan: what of a target and its drafts this machine can hold, and why.

The rules, in this order:

1. The target comes first, with the context and cache asked for and as many layers on devices as
   fit. Where it does not fit at all the plan is a refusal, which lists what would fit.
2. A draft gets what is left. It never pushes a target layer off a device, never shrinks the
   context and never takes the reserve.
3. Where a draft does not fit, the next one does; after the last one drafting comes from n-grams,
   and where even their index does not fit there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from homespec.errors import PlanError
from homespec.models import fitting
from homespec.models import plan_words as words
from homespec.models.alternatives import Alternative, Candidate, alternatives
from homespec.models.fitting import AUTO, Placed, PlanRequest, Use
from homespec.models.gguf_header import Header
from homespec.models.machine import Machine
from homespec.models.memory_estimate import RAM, MemoryParts
from homespec.models.model_shape import model_shape

__all__ = ["AUTO", "Candidate", "ModelPlan", "Plan", "PlanRequest", "plan", "propose"]

_NGRAM_BYTES = 520  # measured: an index of 2- to 5-grams, for each token of the context
Drafting = Literal["draft_model", "ngram", "none"]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model: where it goes and what it takes. parts: bytes by place, RAM and devices."""

    name: str
    gpu_layers: int
    layer_count: int
    devices: tuple[str, ...]
    n_ctx: int
    cache_type_k: str
    cache_type_v: str
    parts: Mapping[str, MemoryParts]

    @property
    def total_bytes(self) -> int:
        """Everything that is resident at the peak, in all places."""
        return sum(part.total for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be loaded, or why nothing is.

    verdict: `fits` as asked for, `reduced` where the drafting had to give way, `refused` where
    the target does not fit. drafter_bytes: the n-gram index, or what a draft's rows take.
    uses: each limit and device with what is needed of it. sentence: the verdict in words.
    """

    verdict: Literal["fits", "reduced", "refused"]
    sentence: str
    target: ModelPlan
    draft: ModelPlan | None
    drafting: Drafting
    drafter_bytes: int
    uses: tuple[Use, ...]
    alternatives: tuple[Alternative, ...] = ()

    @property
    def total_bytes(self) -> int:
        """What the loading process grows by in RAM, at its peak."""
        models = [model for model in (self.target, self.draft) if model]
        return self.drafter_bytes + sum(model.parts[RAM].total for model in models)

    def load_options(self) -> dict[str, Any]:
        """The settings the plan has chosen, named as the engine's."""
        options = {
            "n_ctx": self.target.n_ctx,
            "gpu_layers": self.target.gpu_layers,
            "cache_type_k": self.target.cache_type_k,
            "cache_type_v": self.target.cache_type_v,
        }
        if self.draft:
            options["draft_gpu_layers"] = self.draft.gpu_layers
            options["draft_devices"] = self.draft.devices or None
        return options

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "drafting": self.drafting,
            "target": _as_dict(self.target),
            "draft": _as_dict(self.draft) if self.draft else None,
            "drafter_bytes": self.drafter_bytes,
            "total_bytes": self.total_bytes,
            "uses": [
                {name: getattr(use, name) for name in (*Use.__slots__, "missing_bytes")}
                for use in self.uses
            ],
            "alternatives": [
                {name: getattr(other, name) for name in Alternative.__slots__}
                for other in self.alternatives
            ],
        }


def plan(
    target: Header,
    drafts: Sequence[Header],
    request: PlanRequest,
    machine: Machine,
    candidates: Iterable[Candidate] = (),
) -> Plan:
    """The plan for a target and its drafts, the preferred draft first.

    candidates: other models to name where this one does not fit. Raises PlanError then, and
    UsageError for an unknown device or cache type.
    """
    proposed = propose(target, drafts, request, machine, candidates)
    require(proposed)
    return proposed


def require(proposed: Plan) -> None:
    """Raise PlanError for a refusal."""
    if proposed.verdict == "refused":
        raise PlanError(proposed.sentence, hint=words.would_fit(proposed.alternatives))


def propose(
    target: Header,
    drafts: Sequence[Header],
    request: PlanRequest,
    machine: Machine,
    candidates: Iterable[Candidate] = (),
) -> Plan:
    """As `plan`, but a refusal is returned and not raised."""
    shape = model_shape(target)
    placed = fitting.fit_target(shape, request, machine)
    if placed is None:
        nearest = fitting.smallest_target(shape, request, machine)
        others = alternatives(shape, request, machine, candidates)
        found = fitting.uses(nearest.parts, machine, request)
        sentence = words.refusal(nearest, found)
        return Plan("refused", sentence, _model(nearest), None, "none", 0, found, others)
    with_model = request.drafting in (None, "draft_model")
    shapes = [model_shape(one) for one in drafts] if with_model else []
    reasons: list[str] = []
    for draft_shape in shapes:
        draft = fitting.fit_draft(draft_shape, placed, request, machine)
        if draft:
            return _with_draft(placed, draft, reasons, request, machine)
        nearest = fitting.smallest_draft(draft_shape, placed, request, machine)
        both = fitting.uses(fitting.add_parts(placed.parts, nearest.parts), machine, request)
        reasons.append(words.no_draft(nearest, both))
    return _without_draft(placed, reasons, request, machine)


def _with_draft(
    target: Placed, draft: Placed, reasons: list[str], request: PlanRequest, machine: Machine
) -> Plan:
    found = fitting.uses(fitting.add_parts(target.parts, draft.parts), machine, request)
    instead = [*reasons, f"{draft.shape.name} drafts instead."] if reasons else []
    return Plan(
        "reduced" if reasons else "fits",
        " ".join([*instead, words.spare(target, found)]),
        _model(target),
        _model(draft),
        "draft_model",
        0,
        found,
    )


def _without_draft(
    target: Placed, reasons: list[str], request: PlanRequest, machine: Machine
) -> Plan:
    index = target.settings.n_ctx * _NGRAM_BYTES
    parts = fitting.add_parts(target.parts, {RAM: MemoryParts(other=index)})
    drafting: Drafting = "none" if request.drafting == "none" else "ngram"
    if drafting == "ngram" and not fitting.fits(parts, machine, request):
        drafting = "none"
        reasons = [*reasons, "An index of n-grams does not fit beside the target."]
    if drafting == "none":
        index, parts = 0, dict(target.parts)
    found = fitting.uses(parts, machine, request)
    how = {"ngram": "Drafts come from n-grams instead.", "none": "Decoding is plain."}[drafting]
    sentence = " ".join([*reasons, *([how] if reasons else []), words.spare(target, found)])
    verdict: Literal["fits", "reduced"] = "reduced" if reasons else "fits"
    return Plan(verdict, sentence, _model(target), None, drafting, index, found)


def _model(placed: Placed) -> ModelPlan:
    return ModelPlan(
        name=placed.shape.name,
        gpu_layers=placed.placement.gpu_layers,
        layer_count=len(placed.placement.layers),
        devices=tuple(device.name for device in placed.placement.devices),
        n_ctx=placed.settings.n_ctx,
        cache_type_k=placed.settings.cache_type_k,
        cache_type_v=placed.settings.cache_type_v,
        parts=placed.parts,
    )


def _as_dict(model: ModelPlan) -> dict[str, Any]:
    plain = {name: getattr(model, name) for name in ModelPlan.__slots__ if name != "parts"}
    parts = {place: asdict(part) for place, part in model.parts.items()}
    return {
        **plain,
        "devices": list(model.devices),
        "total_bytes": model.total_bytes,
        "parts": parts,
    }
