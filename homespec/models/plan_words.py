"""The sentences of a memory plan."""

from __future__ import annotations

from collections.abc import Sequence

from homespec.models.alternatives import Alternative
from homespec.models.fitting import Placed, Use, tightest


def size(num_bytes: int) -> str:
    """A size of memory: 1.9 GiB, 480 MiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.0f} MiB"


def spare(target: Placed, found: Sequence[Use]) -> str:
    """How much is taken where the least is left."""
    devices, layers = target.placement.devices, target.placement.layers
    where = ""
    if devices:
        names = ", ".join(device.name for device in devices)
        where = f"{target.placement.gpu_layers} of {len(layers)} layers lie on {names}. "
    worst = tightest(found)
    if worst is None:
        return f"{where}This system does not tell its memory, so nothing was checked."
    return (
        f"{where}{_capital(worst.place)} has {_room(worst)}; {size(worst.needed_bytes)} are needed."
    )


def no_draft(draft: Placed, found: Sequence[Use]) -> str:
    """Why a draft is left out."""
    worst = tightest(found)
    lack = f", {worst.place} lacks {size(worst.missing_bytes)}" if worst else ""
    return f"{draft.shape.name} does not fit beside the target{lack}."


def refusal(target: Placed, found: Sequence[Use]) -> str:
    """Why the target does not fit."""
    worst = tightest(found)
    bound = f": {worst.place} has {_room(worst)}" if worst else ""
    needed = size(worst.needed_bytes) if worst else "more"
    return (
        f"{target.shape.name} needs {needed} with a context of {target.settings.n_ctx} tokens, "
        f"which does not fit{bound}."
    )


def would_fit(others: Sequence[Alternative]) -> str:
    """What would fit instead."""
    changes = [other.text for other in others if other.kind not in ("quantization", "pair")]
    models = [other.text for other in others if other.kind in ("quantization", "pair")]
    if not others:
        return "Nothing known here would fit: close other programs, or take a smaller model."
    sentences = []
    if changes:
        sentences.append(f"It would fit with {' or '.join(changes)}.")
    if models:
        also = "Also" if changes else "These"
        sentences.append(f"{also} would fit: {', '.join(models)}.")
    return " ".join(sentences)


def _room(use: Use) -> str:
    kept = f" and keeps {size(use.reserve_bytes)} in reserve" if use.reserve_bytes else ""
    return f"{size(use.free_bytes)} of {size(use.total_bytes)} free{kept}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
