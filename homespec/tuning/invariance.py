"""Whether a model's logits are the same bits however many tokens a pass holds.

Where they are (*width-invariant* settings), greedy speculative text, and seeded text under the
match rule, is the very text of plain decoding. Kernels may sum in another order for one token than
for many; which settings are free of that depends on the machine and is found out by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from homespec.errors import RefusedError
from homespec.llama.cache_filler import fill
from homespec.llama.context import Context, ContextParams
from homespec.llama.model import Model

WIDTHS = (2, 3, 4, 5, 8, 16)
DEPTHS = (64, 600)  # llama.cpp changes kernels past 512 cells
_TOKENS = 16
_SHORT_LOOK = 64  # tokens in the cache


@dataclass(frozen=True, slots=True)
class WidthDifference:
    """How far logits at one width lay from those of one token a pass.

    depth: tokens in the cache before; difference: the largest over all rows and ids.
    """

    depth: int
    width: int
    difference: float


@dataclass(frozen=True, slots=True)
class WidthReport:
    """All that was compared; `invariant` where every bit agreed."""

    differences: tuple[WidthDifference, ...]

    @property
    def invariant(self) -> bool:
        """Whether every width gave the bits of width 1."""
        return all(entry.difference == 0 for entry in self.differences)

    @property
    def largest(self) -> float:
        """The largest difference of a logit."""
        return max((entry.difference for entry in self.differences), default=0.0)


def probe_widths(
    context: Context, depths: Sequence[int] = DEPTHS, widths: Sequence[int] = WIDTHS
) -> WidthReport:
    """Decode the same tokens one by one and in blocks of each width, at each depth.

    Later blocks stand on keys and values that wide passes wrote, so those are compared too. Depths
    that the context cannot hold are left out. The cache is empty afterwards.
    """
    n_vocab = context.model.n_vocab
    text = np.random.default_rng(0).integers(0, min(n_vocab, 20_000), 1 << 16).tolist()
    found = []
    for depth in depths:
        if depth + _TOKENS > context.n_ctx:
            continue
        fill(context, depth)
        block = text[depth : depth + _TOKENS]
        single = _decode(context, depth, block, 1)
        for width in widths:
            wide = _decode(context, depth, block, width)
            found.append(WidthDifference(depth, width, float(np.abs(wide - single).max())))
    context.clear()
    return WidthReport(tuple(found))


def require_invariant(model: Model, params: ContextParams) -> None:
    """Raise RefusedError where passes over several tokens give other bits than passes over one.

    A short look, at two widths: what devices do differently shows at once.
    """
    with Context(model, replace(params, n_ctx=_SHORT_LOOK + _TOKENS)) as context:
        if context.can_truncate and not probe_widths(context, (_SHORT_LOOK,), (2, 16)).invariant:
            raise RefusedError(
                f"{model.path.name} cannot be decoded strictly exactly where its layers lie: on "
                "a device, passes over several tokens give other bits than passes over one.",
                hint="Keep it on the CPU (-ngl 0), or go without --strict-exact: the distribution "
                "is the target's either way.",
            )


def _decode(context: Context, depth: int, block: Sequence[int], width: int) -> NDArray[np.float32]:
    """(len(block), n_vocab) logits of `block`, `width` tokens a pass."""
    context.truncate(depth)
    rows = []
    for start in range(0, len(block), width):
        part = block[start : start + width]
        rows += [row.logits.copy() for row in context.extend(part, len(part))]
    return np.stack(rows)
