"""llama.cpp itself: loading the library, its log, its build features, and errors it only logs."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homespec.errors import LibraryError
from homespec.llama.interrupts import keep_interrupts

logger = logging.getLogger("homespec.llama")

# ggml's levels, a notch quieter than it rates itself: a failure is raised by us, with a sentence.
_WARNING, _ERROR = 3, 4
_LEVELS = {_WARNING: logging.INFO, _ERROR: logging.INFO}
_recent_errors: collections.deque[str] = collections.deque(maxlen=8)


@functools.cache
def library() -> Any:
    """llama.cpp's low-level bindings, initialised once; its log goes to `homespec.llama`.

    Raises LibraryError where the library is missing or cannot be loaded.
    """
    # An abort inside llama.cpp must end the process, not start a debugger on it.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp  # noqa: PLC0415 - slow, and absent on a half set-up machine
    except (ImportError, OSError, RuntimeError) as exc:
        raise LibraryError(
            f"The llama.cpp library cannot be loaded: {exc}.",
            hint="Run ./scripts/setup, which builds it for this machine.",
        ) from exc
    low_level = llama_cpp.llama_cpp
    low_level.llama_log_set(_log_callback(low_level), ctypes.c_void_p(0))
    low_level.llama_backend_init()
    keep_interrupts()
    return low_level


_TILED, _OWN, _EXACT = "GGML_CPU_TILED_MM", "HOMESPEC_KERNELS", "exact"


def use_exact_kernels() -> None:
    """Have the CPU multiply a row the same way whatever the width of a pass.

    llama.cpp's tiled kernel for K-quants, which takes over at eight tokens, sums in another order,
    and so do homespec's for nine or more. The switches are read once, at the first such pass:
    raises LibraryError where that is over.
    """
    if not exact_kernels_possible():
        raise LibraryError(
            "Exact kernels must be chosen before anything is decoded in this process.",
            hint="Load with strict_exact first, or set "
            f"{_TILED}=0 and {_OWN}={_EXACT} in the environment.",
        )
    os.environ |= kernel_environment(tiled=False, exact=True)


def leave_tiled_kernels() -> bool:
    """Have this process go without llama.cpp's tiled kernels; False where it is too late."""
    if not tiles_left_out() and not _passes_made:
        os.environ[_TILED] = "0"
    return tiles_left_out()


def tiles_left_out() -> bool:
    """Whether this process goes without llama.cpp's tiled kernels."""
    return os.environ.get(_TILED) == "0"


def exact_kernels_possible() -> bool:
    """Whether `use_exact_kernels` is in time, or has been called."""
    used = tiles_left_out() and (not has_own_kernels() or os.environ.get(_OWN) == _EXACT)
    return used or not _passes_made


def has_own_kernels() -> bool:
    """Whether this build multiplies K-quants with several tokens by homespec's own kernels.

    They are in builds of scripts/setup, for x86 CPUs with AVX2.
    """
    if os.environ.get(_OWN) == "0":
        return False
    try:
        count = ggml().homespec_products
    except AttributeError:
        return False
    count.restype = ctypes.c_int64
    return bool(count() >= 0)


def own_kernels_pay() -> bool:
    """Whether homespec's kernels are to be expected the faster ones, where that was not measured.

    They are on CPUs without instructions for dot products of bytes. A user may have asked for the
    tiled kernels.
    """
    built_for = build_features().get("CPU", [])
    has_dot_products = any("VNNI" in feature for feature in built_for)
    return has_own_kernels() and not has_dot_products and os.environ.get(_TILED, "0") == "0"


def kernel_environment(*, tiled: bool, own: bool = True, exact: bool = False) -> dict[str, str]:
    """What a process is to find in its environment before its first pass.

    tiled: with llama.cpp's tiled kernels; own: with homespec's, unless these are turned off, and
    exact: with the bits of one token at a time.
    """
    own = own and os.environ.get(_OWN) != "0"
    return {_TILED: str(int(tiled)), _OWN: _EXACT if own and exact else str(int(own))}


_passes_made: list[bool] = []


def note_pass() -> None:
    """Called when a context is about to be used."""
    _passes_made[:] = [True]


def ggml() -> Any:
    """ggml's functions, device queries among them, as llama.cpp itself sees them.

    Looked up through llama.cpp's own library: the package ships a second copy of libggml under
    another name, which would have a device registry of its own.
    """
    return library()._lib


@functools.cache
def _log_callback(low_level: Any) -> Any:
    # Kept by the cache: llama.cpp holds a pointer to it for good.
    def log(level: int, text: bytes, _: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if not line or line.strip(".") == "":
            return
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)
        if level == _ERROR:
            _recent_errors.append(line)

    return low_level.llama_log_callback(log)


def clear_errors() -> None:
    """Forget what llama.cpp logged; called before an operation that may fail."""
    _recent_errors.clear()


def last_error() -> str:
    """What llama.cpp said when it failed, without its function names; "" if nothing."""
    for line in _recent_errors:
        found = re.sub(r"^[\w:~]+(\([^)]*\))?: ", "", line)
        found = re.sub(r"^error loading model( \w+)?: ", "", found)
        if found and "failed to load model" not in found:
            return found
    return ""


@dataclass(slots=True)
class Captured:
    """What native code wrote."""

    text: str = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Keep what native code prints on stderr from the terminal, and hand it over."""
    captured = Captured()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            captured.text = file.read().decode("utf-8", "replace").strip()


def version() -> str:
    """The version of llama-cpp-python, the package that carries the library."""
    import llama_cpp  # noqa: PLC0415 - as above

    return str(llama_cpp.__version__)


_READ_WHOLE = 64 << 20  # bytes: a larger file, of GPU kernels, is known by its date


@functools.cache
def build_id() -> str:
    """What tells this build of the library from others of its version."""
    digest = hashlib.sha256(repr(build_features()).encode())
    if os.environ.get(_OWN) == "0":
        digest.update(_OWN.encode())
    folder = Path(library()._lib._name).parent
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        stats = path.stat()
        digest.update(f"{path.name} {stats.st_size}".encode())
        small = stats.st_size <= _READ_WHOLE
        digest.update(path.read_bytes() if small else str(stats.st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def build_features() -> dict[str, list[str]]:
    """What the library was built for: {"CPU": ["AVX2", "FMA", ...], "CUDA": [...]}."""
    text: bytes = library().llama_print_system_info()
    features: dict[str, list[str]] = {}
    backend = "CPU"
    for part in text.decode().split("|"):
        label, _, rest = part.strip().rpartition(" : ")
        backend = label or backend
        name, _, value = rest.partition(" = ")
        if name and value.strip() not in ("", "0"):
            features.setdefault(backend, []).append(
                name if value.strip() == "1" else f"{name}={value.strip()}"
            )
    return features
