"""What a person sees: colours, progress and figures, on stderr; answers alone go to stdout."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # an error is told without numpy
    from homespec.decoding.stats import GenerationStats
    from homespec.doctor import Diagnosis

# Everything a terminal might obey, but newline and tab: C0, DEL, C1; and what makes it show text
# in another order than it stands. Letters of languages written from the right need none of those.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_console(**options: Any) -> Console:
    """A console, of stdout, to which no word of a model, a file or a user is markup or an emoji.

    rich honours NO_COLOR, dumb terminals and pipes.
    """
    return Console(highlight=False, markup=False, emoji=False, **options)


def stderr() -> Console:
    """The console for people."""
    return plain_console(stderr=True, soft_wrap=True)


def print_error(message: str, hint: str | None) -> None:
    """One sentence and a hint."""
    console = stderr()
    console.print(Text("error: ", "bold red") + Text(printable(message)))
    if hint:
        console.print(Text("hint: ", "cyan") + Text(printable(hint)))


def print_note(text: str) -> None:
    """A sentence for people."""
    stderr().print(Text(printable(text)))


def printable(text: str) -> str:
    """Text without control characters: a model's output must not steer the terminal."""
    return _CONTROL.sub("\ufffd", text)


def human_bytes(num_bytes: float) -> str:
    """1.5 GiB, 300 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    digits = 0 if num_bytes >= 100 or units[0] == "B" else 1
    return f"{num_bytes:.{digits}f} {units[0]}"


class AnswerWriter:
    """Streams an answer to stdout: tinted on a terminal if asked, the bare text into a pipe."""

    def __init__(self, *, show_accepted: bool = False) -> None:
        self._terminal = sys.stdout.isatty()
        self._console = plain_console(soft_wrap=True)
        self._tint = show_accepted and self._terminal and self._console.color_system is not None
        self._last = "\n"

    def write(self, text: str, *, accepted: bool = False) -> None:
        """A piece of the answer."""
        shown = printable(text) if self._terminal else text
        if accepted and self._tint:
            self._console.print(Text(shown, "green"), end="")
        else:
            sys.stdout.write(shown)
            sys.stdout.flush()
        self._last = shown[-1:] or self._last

    def end(self) -> None:
        """Close the line."""
        if self._last != "\n":
            self.write("\n")


def figures(stats: GenerationStats) -> str:
    """The line after an answer."""
    parts = [
        f"first token {stats.time_to_first_token_seconds:.2f} s",
        f"prompt {stats.prompt_tokens_per_second:.0f} tok/s",
        f"decode {stats.decode_tokens_per_second:.1f} tok/s",
        f"acceptance length {stats.mean_acceptance_length:.2f}",
    ]
    if stats.num_drafted:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.num_drafted} drafted accepted")
    parts.append(f"draft {stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s")
    if stats.peak_memory_bytes:
        parts.append(f"peak {human_bytes(stats.peak_memory_bytes)}")
    return " · ".join(parts)


def print_diagnosis(diagnosis: Diagnosis, settings: dict[str, Any]) -> None:
    """The findings of `homespec doctor` on stdout."""
    console = plain_console()
    library = diagnosis.stages.get("library", {})
    facts = Table("what", "found", box=None, pad_edge=False, show_header=False)
    for name, value in diagnosis.versions.items():
        facts.add_row(name, value)
    if library:
        facts.add_row("processor", f"{library['cpu']}, {library['threads']} threads used")
        ours = "homespec's, for several tokens at once"
        facts.add_row("K-quants", ours if library["own_kernels"] else "llama.cpp's kernels alone")
    console.print(facts)
    features = Table("instruction set", "processor", "build", title="CPU", title_justify="left")
    for row in diagnosis.features:
        features.add_row(row.name, *("yes" if on else "no" for on in (row.in_cpu, row.in_build)))
    console.print(features)
    devices = Table("device", "kind", "free", "total", title="Devices", title_justify="left")
    for device in library.get("devices", []):
        free, total = human_bytes(device["free_bytes"]), human_bytes(device["total_bytes"])
        name = f"{device['name']} ({device['description']})"
        devices.add_row(name, device["kind"], free, total)
    console.print(devices)
    if decode := diagnosis.stages.get("decode"):
        console.print(
            f"Self-test: prompt {decode['prompt_tokens_per_second']:.0f} tok/s, "
            f"decode {decode['tokens_per_second']:.1f} tok/s"
        )
    if widths := diagnosis.stages.get("widths"):
        kinds = {device["kind"] for device in library.get("devices", [])}
        console.print(_promise(widths, settings, on_device=bool(kinds & {"gpu", "igpu"})))


def _promise(widths: dict[str, Any], settings: dict[str, Any], *, on_device: bool) -> str:
    used = (
        "--strict-exact"
        if settings.get("exact_kernels")
        else f"flash attention {settings['flash_attention']}, "
        f"K {settings['cache_type_k']}, V {settings['cache_type_v']}"
    )
    if widths["invariant"]:
        return (
            f"Width-invariant with {used}: greedy speculative text is the text of plain decoding, "
            "bit for bit."
        )
    cure = "--strict-exact cures it; passes may cost more."
    if on_device:
        cure = "A device's kernels are like that; --strict-exact cures it on the CPU, with -ngl 0."
    elif settings.get("exact_kernels"):
        cure = "This CPU has kernels that --strict-exact does not know."
    return (
        f"Not width-invariant with {used}: logits differ by up to {widths['largest']:.2g} between "
        "passes of one and of many tokens, so greedy text may part from plain decoding at a "
        f"near-tie. {cure}"
    )


class LoadBars:
    """Progress of downloads (bytes, rate, time left) and loads, gone when they are done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def download(self, name: str, done: int, total: int | None) -> None:
        """A download moved on."""
        task = self._task(name, total)
        if done:
            self._progress.start_task(task)
        self._progress.update(task, completed=done, total=total)

    def _task(self, name: str, total: int | None) -> TaskID:
        if not self._tasks:
            self._progress.start()
        if name not in self._tasks:
            # A file that waits for another has no rate yet: its clock starts with its first byte.
            self._tasks[name] = self._progress.add_task(printable(name), total=total, start=False)
        return self._tasks[name]


@contextmanager
def load_bars() -> Iterator[LoadBars]:
    """Bars on stderr while files are fetched; nothing where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = stderr()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        yield LoadBars(progress)  # nothing is drawn before something is fetched
    finally:
        progress.stop()
