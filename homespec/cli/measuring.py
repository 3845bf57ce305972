"""Measuring that takes minutes: progress on a terminal, and an end at Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from homespec.console import printable, stderr
from homespec.tuning.notebook import Progress as Tell


@contextmanager
def measuring() -> Iterator[Tell]:
    """Yield what is to be told of the progress; Ctrl-C and SIGTERM raise KeyboardInterrupt."""
    with _progress() as tell, _interruptible():
        yield tell


@contextmanager
def _progress() -> Iterator[Tell]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("", total=1.0)

        def tell(what: str, share: float) -> None:
            bars.update(task, description=printable(what), completed=share)

        yield tell


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
