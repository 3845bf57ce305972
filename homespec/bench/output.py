"""A result as JSON: what was measured, and what follows from it."""

from __future__ import annotations

from typing import Any

from homespec.bench.records import BenchResult
from homespec.bench.summary import summarize, verdicts


def as_dict(result: BenchResult) -> dict[str, Any]:
    """Ready for JSON; `BenchResult.from_dict` reads it back."""
    return {
        **result.as_dict(),
        "verdicts": verdicts(result),
        "figures": [figures.as_dict() for figures in summarize(result)],
    }
