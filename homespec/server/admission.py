"""How many answers are let in: those that run, and a bounded queue of those that wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from homespec.decoding.stats import clock
from homespec.server.errors import ApiError

_LONGEST_WAIT = 60  # seconds told in Retry-After
_MEMORY = 0.8  # of the mean of how long answers take


class Admission:
    """Counts answers on their way. parallel: those that run at once."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self.parallel = 1
        self.num_open = 0
        self._mean_seconds = 1.0

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Let `count` answers in, or raise an ApiError that says when to come again."""
        if self.num_open and self.num_open + count > self.parallel + self._queue:
            raise ApiError(
                429,
                "The server is busy: its queue is full.",
                kind="rate_limit_error",
                code="queue_full",
                retry_after=self._wait(),
            )
        self.num_open += count
        began = clock()
        try:
            yield
        finally:
            self.num_open -= count
            self._mean_seconds += (1 - _MEMORY) * (clock() - began - self._mean_seconds)

    def _wait(self) -> int:
        """Seconds until a place is free, more or less."""
        waits = self._mean_seconds / max(self.parallel, 1)
        return max(1, min(_LONGEST_WAIT, math.ceil(waits)))
