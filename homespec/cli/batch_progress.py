"""What is seen of a batch while it runs, and how Ctrl-C ends it in steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from homespec.batch.run import BatchRun, Summary, Tell
from homespec.console import print_note, stderr

_LOG_SECONDS = 60


@contextmanager
def progress(*, quiet: bool) -> Iterator[Tell]:
    """A bar on a terminal, a line a minute elsewhere, nothing if quiet."""
    console = stderr()
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with _bar() as tell:
            yield tell
    else:
        yield _log()


@contextmanager
def _bar() -> Iterator[Tell]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} tok/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}", style="red"),
    )
    with Progress(*columns, console=stderr(), transient=True) as bars:
        task = bars.add_task("", rate=0.0, failed="")

        def tell(summary: Summary) -> None:
            ended = summary.num_done + summary.num_failed
            bars.update(
                task,
                total=summary.num_rows - summary.num_skipped,
                completed=ended,
                rate=summary.tokens_per_second,
                failed=f"{summary.num_failed} failed" if summary.num_failed else "",
            )

        yield tell


def _log() -> Tell:
    last = time.monotonic()

    def tell(summary: Summary) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOG_SECONDS:
            return
        last = now
        ended = summary.num_done + summary.num_failed
        words = [f"{ended + summary.num_skipped} of {summary.num_rows} rows"]
        words.append(f"{summary.tokens_per_second:.1f} tok/s")
        if ended:
            left = summary.num_left * summary.seconds / ended
            words.append(f"about {_duration(left)} left")
        if summary.num_failed:
            words.append(f"{summary.num_failed} failed")
        print_note(", ".join(words))

    return tell


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{rest} s"


@contextmanager
def stop_in_steps(run: BatchRun, *, drop: bool, quiet: bool) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM begins no more rows, the second gives up those on their way.

    drop: the first one does both. Python runs its handlers between its own instructions, not
    within a pass that takes seconds: a thread hears of the signals through a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        if os.read(reader, 1) == _DONE:
            return
        if not drop:
            run.stop()
            if not quiet:
                print_note("Finishing the rows on their way; Ctrl-C again gives them up.")
            if os.read(reader, 1) == _DONE:
                return
        run.drop()
        while os.read(reader, 1) != _DONE:
            pass

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    descriptor = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.write(writer, _DONE)
        thread.join()
        os.close(reader)
        os.close(writer)


_DONE = b"\0"  # no signal has this number
