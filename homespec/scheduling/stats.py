"""What the passes of a scheduler added up to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class SchedulerStats:
    """Counters and clocks, in seconds.

    num_evaluated: tokens in passes, of prompts, answers and drafts; num_cached_tokens: of prompts,
    taken up from another sequence; num_displaced: how often a sequence lost its cells for a while.
    """

    num_passes: int = 0
    num_evaluated: int = 0
    num_rows: int = 0
    num_cached_tokens: int = 0
    num_displaced: int = 0
    pass_seconds: float = 0.0
    sample_seconds: float = 0.0

    def record(self, width: int, num_rows: int, seconds: float) -> None:
        """Count a pass."""
        self.num_passes += 1
        self.num_evaluated += width
        self.num_rows += num_rows
        self.pass_seconds += seconds

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
