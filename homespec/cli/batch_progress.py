"""What is seen of a batch while it runs, and how Ctrl-C ends it in steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from homespec.batch.run import BatchRun, Summary, Tell
from homespec.cli.signals import told_at_once
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

    drop: the first one does both.
    """
    heard: list[int] = []

    def stop(number: int) -> None:
        heard.append(number)
        if drop or len(heard) > 1:
            run.drop()
            return
        run.stop()
        if not quiet:
            print_note("Finishing the rows on their way; Ctrl-C again gives them up.")

    with told_at_once(stop, lambda _: None):
        yield
