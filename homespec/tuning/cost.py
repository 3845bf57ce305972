"""What a pass costs: seconds over n tokens with so many tokens in the cache, from measured points.

Costs rise in steps (a kernel takes over at a width, a thread more has work), so nothing is fitted
through the points: they are joined by straight lines, and only made monotone, since a pass over
more tokens, or on a longer context, that seems cheaper is noise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32)
"""Tokens a pass that are measured for a target."""

Row = tuple[float, ...]
_Grid = tuple[tuple[int, ...], tuple[int, ...], tuple[Row, ...]]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a pass, by context length and by the tokens it evaluates.

    context_lengths: tokens in the cache before the pass, rising. widths: tokens of the pass,
    rising. table: seconds[context length][width], rising or level along both.
    Raises ValueError for a table of another shape, or with values that cannot be times.
    """

    context_lengths: tuple[int, ...]
    widths: tuple[int, ...]
    table: tuple[Row, ...]
    _grid: _Grid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in (self.context_lengths, self.widths):
            if not axis or any(low >= high for low, high in pairwise(axis)):
                raise ValueError(f"the points of a cost curve must rise, not {axis}")
        if len(self.table) != len(self.context_lengths):
            raise ValueError("a cost curve needs a row for each context length")
        if any(len(row) != len(self.widths) for row in self.table):
            raise ValueError("a cost curve needs a value for each width")
        if not all(0 < value < math.inf for row in self.table for value in row):
            raise ValueError("a pass takes more than no time, and ends")
        object.__setattr__(self, "_grid", _extended(self.context_lengths, self.widths, self.table))

    @classmethod
    def from_points(cls, points: Mapping[tuple[int, int], float]) -> CostCurve:
        """The curve through {(context length, width): seconds}, made monotone.

        A context length that lacks one of the widths is left out (measuring was interrupted).
        """
        widths = tuple(sorted({width for _, width in points}))
        lengths = tuple(
            length
            for length in sorted({length for length, _ in points})
            if all((length, width) in points for width in widths)
        )
        rows = [isotonic([points[length, width] for width in widths]) for length in lengths]
        # Isotonic regression keeps order among its inputs, so the rows stay monotone.
        columns = [isotonic(column) for column in zip(*rows, strict=True)]
        table = [[float(f"{value:.4g}") for value in row] for row in zip(*columns, strict=True)]
        return cls(lengths, widths, tuple(map(tuple, table)))

    def seconds(self, num_tokens: int, context_length: int) -> float:
        """Seconds of a pass over `num_tokens` with `context_length` tokens in the cache.

        Past the measured widths and lengths the last slope goes on; below them the first value
        stands.
        """
        lengths, widths, table = self._grid
        row, down = _place(lengths, context_length)
        column, along = _place(widths, num_tokens)
        upper, lower = table[row], table[row + 1]
        first = upper[column] + along * (upper[column + 1] - upper[column])
        second = lower[column] + along * (lower[column + 1] - lower[column])
        return first + down * (second - first)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "context_lengths": list(self.context_lengths),
            "widths": list(self.widths),
            "seconds": [list(row) for row in self.table],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostCurve:
        """The curve from `as_dict`. Raises ValueError, KeyError or TypeError where it is none."""
        return cls(
            tuple(map(int, values["context_lengths"])),
            tuple(map(int, values["widths"])),
            tuple(tuple(map(float, row)) for row in values["seconds"]),
        )


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """The rising sequence nearest in squares: pool adjacent violators (Ayer et al. 1955)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count >= total * blocks[-1][1]:
            before, number = blocks.pop()
            total, count = total + before, count + number
        blocks.append((total, count))
    return tuple(total / count for total, count in blocks for _ in range(count))


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """(i, share): `value` lies `share` of the way from axis[i] to axis[i + 1]; past the end > 1."""
    if value <= axis[0]:
        return 0, 0.0
    low = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return low, (value - axis[low]) / (axis[low + 1] - axis[low])


def _extended(lengths: Sequence[int], widths: Sequence[int], table: Sequence[Row]) -> _Grid:
    """The table with a point more along both axes, for what lies past its ends."""
    rows = [*table, _next(table)]
    columns = list(zip(*rows, strict=True))
    columns.append(_next(columns))
    return _longer(lengths), _longer(widths), tuple(zip(*columns, strict=True))


def _longer(axis: Sequence[int]) -> tuple[int, ...]:
    return (*axis, 2 * axis[-1] - axis[-2] if len(axis) > 1 else axis[-1] + 1)


def _next(rows: Sequence[Row]) -> Row:
    """A row that follows with the slope of the last two, kept rising along the row itself."""
    steps = [high - low for low, high in zip(rows[-2], rows[-1], strict=True)] if rows[1:] else []
    rising = accumulate(steps or [0.0] * len(rows[-1]), max)
    return tuple(value + step for value, step in zip(rows[-1], rising, strict=True))
