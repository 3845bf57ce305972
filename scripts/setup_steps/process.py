"""Child processes that are logged, watched line by line, and stopped with all they started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeAlias

# What a command line is made of.
Command: TypeAlias = Sequence[str | Path]
GRACE_SECONDS = 15.0


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end the set-up just as Ctrl-C does."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _stop(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


def stop_on_signals() -> None:
    """Make a termination request clean up like Ctrl-C."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)


def run_logged(
    command: Command,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    on_tick: Callable[[], None] = lambda: None,
) -> int:
    """Run a command, append its output to `log`, and return its exit status.

    `on_line` sees each line, `on_tick` is called about once a second. An interruption goes on to
    the command and its children (make tools then delete half-written files) and is raised again.
    """
    with (
        log.open("ab") as file,
        subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # its own group, so that all of it can be signalled
        ) as process,
    ):
        file.write(f"$ {' '.join(str(part) for part in command)}\n".encode())
        try:
            for line in _lines(process, on_tick):
                file.write(line)
                on_line(line.decode("utf-8", "replace"))
            return process.wait()
        except BaseException:
            _end_group(process)
            raise


def _lines(process: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> Iterator[bytes]:
    """The output's lines as they come, with a tick in every second without one."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    rest = b""
    while True:
        if not select.select([descriptor], [], [], 1.0)[0]:
            on_tick()
            continue
        block = os.read(descriptor, 1 << 16)
        if not block:
            break
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest + b"\n"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process and its children, and kill what does not end in time."""
    for signum in (signal.SIGINT, signal.SIGKILL):
        _signal_group(process, signum)
        deadline = time.monotonic() + GRACE_SECONDS
        while _signal_group(process, 0) and time.monotonic() < deadline:
            time.sleep(0.05)


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> bool:
    """Send a signal to the group, 0 for none; whether it had members."""
    process.poll()  # an ended leader that nobody asked after would count
    try:
        os.killpg(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
