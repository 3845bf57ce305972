"""What a long step shows: a line that is rewritten on a terminal, one every tenth elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


def say(text: str) -> None:
    """Print a line at once, so that it stands before a child's output."""
    print(text, flush=True)


def clock_text(seconds: float) -> str:
    """125.4 -> "2:05"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def about(seconds: float) -> str:
    """A duration as one says it: "about 4 minutes"."""
    if seconds < 90:
        return "about a minute"
    return f"about {round(seconds / 60)} minutes"


class Progress:
    """Shows how far a build of known length has come, with the elapsed and the expected time.

    `expected_seconds` is the guess at the start; as steps finish it gives way to what was seen.
    """

    def __init__(
        self,
        label: str,
        expected_seconds: float,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._guess = expected_seconds
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._begin = clock()
        self._is_terminal = self._stream.isatty()
        self._done = self._total = 0
        self._printed_tenth = -1

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._begin

    def expected_seconds(self) -> float:
        """Elapsed time, and what is left of the guess; exact at the end, whatever the guess."""
        left = 1 - self._done / self._total if self._total else 1.0
        return self.elapsed_seconds + left * self._guess

    def scale(self, factor: float) -> None:
        """Only this part of what was guessed is left to do."""
        self._guess *= factor

    def update(self, done: int, total: int) -> None:
        """Step `done` of `total` is through."""
        self._done, self._total = done, total
        tenth = 10 * done // total if total else 0
        if self._is_terminal:
            self.tick()
        elif tenth != self._printed_tenth:
            self._printed_tenth = tenth
            print(self._text(), file=self._stream, flush=True)

    def tick(self) -> None:
        """Rewrite the line with the present time; nothing where it cannot be rewritten."""
        if self._is_terminal:
            print(f"\r\x1b[K{self._text()}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _text(self) -> str:
        steps = f" [{self._done}/{self._total}]" if self._total else ""
        times = f"{clock_text(self.elapsed_seconds)} of about {clock_text(self.expected_seconds())}"
        return f"{self._label}{steps} {times}"
