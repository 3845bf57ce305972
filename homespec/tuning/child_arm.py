"""The target with other kernels, in a child process: llama.cpp reads that switch only once.

`python -m homespec.tuning.child_arm MODEL SETTINGS` loads it and then answers lines of JSON on
standard input, `{"table": [lengths, widths]}` or `{"probe": true}`, with one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from homespec.closing import Closing
from homespec.errors import CannotRunError, HomespecError
from homespec.llama.library import kernel_environment
from homespec.tuning.invariance import probe_widths
from homespec.tuning.measure import Timings, opened, time_table
from homespec.tuning.placement import Placement
from homespec.tuning.profile import Switches, WidthPromise, plain, typed


class ChildArm(Closing):
    """The child process, seen from its parent. Use it in a `with` block."""

    def __init__(
        self,
        model: Path,
        switches: Switches,
        n_ctx: int,
        place: Placement,
        *,
        tiled: bool = False,
        own: bool = True,
        exact: bool = False,
    ) -> None:
        """Load the model there; with kernels as `homespec.llama.library.kernel_environment`."""
        settings = {
            "switches": plain(switches),
            "n_ctx": n_ctx,
            "placement": plain(place),
        }
        command = [sys.executable, "-m", "homespec.tuning.child_arm", str(model)]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            [*command, json.dumps(settings)],
            env={**os.environ, **kernel_environment(tiled=tiled, own=own, exact=exact)},
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def _ask(self, **question: Any) -> Any:
        stdin, stdout = self._child.stdin, self._child.stdout
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            if stdin and stdout:
                stdin.write(json.dumps(question) + "\n")
                stdin.flush()
                answer = stdout.readline()
        if not answer:
            raise CannotRunError(
                "llama.cpp ended while it was tried with other kernels.",
                hint="See what `homespec doctor` says, and `homespec doctor --strict-exact`.",
            )
        found = json.loads(answer)
        if "error" in found:
            raise CannotRunError(found["error"])
        return found["answer"]

    def table(self, lengths: tuple[int, ...], widths: tuple[int, ...]) -> Timings:
        """`time_table` there."""
        timings: Timings = self._ask(table=[lengths, widths])
        return timings

    def probe(self) -> WidthPromise:
        """Whether its logits are the same bits at every width."""
        return WidthPromise(**self._ask(probe=True))

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.communicate()


def _child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    switches = typed(Switches, settings["switches"])
    place = typed(Placement, settings["placement"])
    try:
        with (
            place.load(path, repack=switches.repack) as model,
            opened(model, switches, settings["n_ctx"]) as context,
        ):
            for line in sys.stdin:
                question = json.loads(line)
                if "table" in question:
                    _say(answer=time_table(context, *question["table"]))
                else:
                    report = probe_widths(context)
                    _say(answer={"invariant": report.invariant, "largest": report.largest})
    except HomespecError as exc:
        _say(error=exc.message)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _child()
