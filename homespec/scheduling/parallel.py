"""How many sequences at once: as many as the cost of a pass makes worthwhile, and memory holds."""

from __future__ import annotations

from collections.abc import Callable

from homespec.decoding.depth import PassCost
from homespec.llama.context import Context
from homespec.tuning.cost import CostCurve
from homespec.tuning.measure import points, time_table

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of sequences that are tried."""

CELLS_EACH = 1024
"""Cells of the cache planned for each: what rows take mostly. A row may take as many as n_ctx."""

PROBE_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PROBE_CONTEXT = 256
_ENOUGH = 0.97  # of the best throughput: more sequences would only hold more memory


def best_parallel(cost: PassCost, limit: int, context: int = PROBE_CONTEXT) -> int:
    """The fewest sequences, `limit` at most, that give nearly the most tokens per second."""
    rates = {n: n / cost.seconds(n, context) for n in COUNTS if n <= limit}
    most = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= _ENOUGH * most)


def probe(context: Context, most: int) -> CostCurve:
    """A cost curve good enough to choose by up to `most`, where none was measured: some seconds."""
    widths = [width for width in PROBE_WIDTHS if width < 2 * most]
    # What disturbs a pass makes it slower: of two rounds the faster one is the truer.
    rounds = [points(time_table(context, (PROBE_CONTEXT,), widths)) for _ in range(2)]
    return CostCurve.from_points({key: min(timed[key] for timed in rounds) for key in rounds[0]})


def largest_that_fits(fits: Callable[[int], bool], wanted: int, least: int) -> int:
    """The most cells, `wanted` halved as often as needed, but at least `least`."""
    cells = wanted
    while cells > least and not fits(cells):
        cells //= 2
    return max(cells, least)
