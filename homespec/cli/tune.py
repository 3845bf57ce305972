"""`homespec tune`: measure what a pair does best on this machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from homespec.cli import options
from homespec.cli.profile_table import print_profile
from homespec.console import load_bars, printable, stderr
from homespec.errors import UsageError
from homespec.models.pairs import fetch_pair, find_pair
from homespec.tune import profile_of, tune_pair
from homespec.tuning.notebook import Progress as Tell
from homespec.tuning.plot import check_plot, draw
from homespec.tuning.profile import Profile
from homespec.tuning.tune import TuneParams


@click.command("tune")
@click.argument("pair", required=False, metavar="[PAIR]")
@options.model_options
@click.option("--show", is_flag=True, help="Print what was measured before; measure nothing.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw the cost of passes and the expected speed (needs matplotlib).",
)
@click.option(
    "--budget",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help="Time to spend (default: 20 to 120 by the target's speed). All is measured at least once.",
)
@click.option("--thorough", is_flag=True, help="Try drafts too whose making takes minutes.")
@click.option("--fresh", is_flag=True, help="Do not go on from an interrupted run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(pair: str | None, **flags: Any) -> None:
    """Measure what this machine is good at with PAIR, and keep it for every later start.

    PAIR is a pair of the catalogue, a GGUF file, a source or user/repo[:QUANT]; -m and -md name
    target and draft apart. An interrupted run goes on where it was.
    """
    named = options.model_references(flags)
    if pair is not None:
        if named["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        named["target"] = pair
    plot: Path | None = flags["plot"]
    if plot is not None:
        check_plot(plot)
    meant = find_pair(**named)
    if flags["show"]:
        profile = profile_of(meant)
    else:
        with load_bars() as bars:
            target, draft = fetch_pair(meant, progress=bars.download, offline=named["offline"])
        params = TuneParams(
            budget_seconds=flags["budget"], thorough=flags["thorough"], fresh=flags["fresh"]
        )
        profile = _measure(target, draft, params)
    if flags["as_json"]:
        options.print_json(profile.as_dict())
    else:
        print_profile(profile)
    if plot is not None:
        draw(profile, plot)


def _measure(target: Path, draft: Path | None, params: TuneParams) -> Profile:
    with _progress() as tell, _interruptible():
        return tune_pair(target, draft, params, tell)


@contextmanager
def _progress() -> Iterator[Tell]:
    columns = (
        TextColumn("{task.description}"),
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
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, but not inside llama.cpp's log callback.

    What is raised there is lost on the way through C; the signal is sent again a moment later.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.endswith("llama/library.py"):
                threading.Timer(0.05, signal.raise_signal, [number]).start()
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
