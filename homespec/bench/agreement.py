"""Where two answers part, and how near a tie the target was there."""

from __future__ import annotations

from collections.abc import Sequence

from homespec.bench.records import Difference
from homespec.decoding.speculative import common_prefix_length
from homespec.engine import Engine


def first_difference(
    engine: Engine, prompt: list[int], first: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """None where both say the same, as far as the shorter goes.

    The target reads the prompt and what both share once more, in one go; what it makes of the two
    tokens that follow is the gap.
    """
    shared = common_prefix_length(list(first), list(other))
    if shared == min(len(first), len(other)):
        return None
    engine.context.clear()
    [row] = engine.context.extend([*prompt, *first[:shared]], num_rows=1)
    logits = row.logits
    gap = abs(float(logits[first[shared]]) - float(logits[other[shared]]))
    engine.context.clear()
    return Difference(shared, gap)
