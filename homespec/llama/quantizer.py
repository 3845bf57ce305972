"""llama.cpp's own quantizer, for copies of a draft in a type that this machine multiplies faster.

It runs in a child process: nothing in llama.cpp can stop it half-way, and a process can be ended.
`python -m homespec.llama.quantizer SOURCE DESTINATION TYPE THREADS` is that child; it prints a line
`done/all` for each tensor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from homespec.disk import whole_file
from homespec.errors import CannotRunError, DiskError, ModelError
from homespec.llama.devices import num_threads
from homespec.llama.library import last_error, library

QUANTIZATIONS = {"Q4_0": 2, "Q4_K": 14, "Q8_0": 7, "Q5_0": 8, "IQ4_NL": 25}
"""Types to try, and llama.cpp's numbers for them.

Rows that no block of 256 weights fits (K-quants) get a type with blocks of 32 instead, tensor by
tensor: Q4_K becomes Q5_0.
"""

_DONE = re.compile(r"(\d+)/(\d+)")
_PROGRESS = re.compile(r"\[ *(\d+)/ *(\d+)\]")


def quantize(
    source: Path,
    destination: Path,
    quantization: str,
    *,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write a copy of a model with all its matrices in one type; whole, or not at all.

    progress: called with the share done. Raises ModelError, DiskError, CannotRunError.
    """
    with whole_file(destination) as part:
        _run([str(source), str(part), quantization, str(num_threads())], progress)


def _run(arguments: list[str], progress: Callable[[float], None] | None) -> None:
    command = [sys.executable, "-m", "homespec.llama.quantizer", *arguments]
    said = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            for line in child.stdout or ():
                done = _DONE.fullmatch(line.strip())
                said = said if done else line.strip()
                if progress and done:
                    progress(int(done[1]) / int(done[2]))
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise _error(Path(arguments[0]).name, child.returncode, said)


def _error(name: str, code: int, problem: str) -> Exception:
    if code < 0:
        return CannotRunError(
            f"The quantizer was ended ({signal.Signals(-code).name}) while it worked on {name}.",
            hint="It may have lacked memory; go without a fitted draft.",
        )
    if "iostream" in problem:  # all that C++ says of a failed write
        return DiskError(
            f"The requantized copy of {name} cannot be written.",
            hint="Make room, or set XDG_CACHE_HOME to a larger disk.",
        )
    return ModelError(f"llama.cpp cannot requantize {name}: {problem or 'it gave no reason'}.")


def _child() -> None:
    # Python's handlers would wait for llama.cpp's end; a parent that is gone ends the child too.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    source, destination, quantization, threads = sys.argv[1:]
    lib = library()
    logger = logging.getLogger("homespec.llama")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_ProgressPrinter())
    params = lib.llama_model_quantize_default_params()
    params.nthread = int(threads)
    params.ftype = QUANTIZATIONS[quantization]
    params.allow_requantize = params.pure = True
    paths = os.fsencode(source), os.fsencode(destination)
    if lib.llama_model_quantize(*paths, ctypes.byref(params)):
        sys.exit(last_error() or "no reason")


class _ProgressPrinter(logging.Handler):
    """Turns llama.cpp's log into `done/all` lines."""

    def emit(self, record: logging.LogRecord) -> None:
        if found := _PROGRESS.match(record.getMessage()):
            print(f"{found[1]}/{found[2]}", flush=True)


if __name__ == "__main__":
    _child()
