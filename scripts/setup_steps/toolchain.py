"""The C++ compiler: that there is one, what `native` means to it, and whether it gets AMX right."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from setup_steps.diagnosis import SetupError, how_to_install

PROBE = Path(__file__).with_name("amx_probe.cpp")
COMPILER_PAIRS: tuple[tuple[str, str], ...] = (("cc", "c++"), ("gcc", "g++"), ("clang", "clang++"))
SMALL_PROGRAM = "#include <cstdint>\n#include <thread>\nint main() { return 0; }\n"
YARDSTICK = """
#include <regex>
int main() { return std::regex_match("a", std::regex("a*")); }
"""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A working pair of compilers.

    `native_macros`: what the compiler predefines for this very CPU beyond the usual,
    `{"__AVX2__", ...}`; they decide which kernels a native build holds. `link_flags`: what the
    libraries are linked with beyond the usual.
    """

    cc: str
    cxx: str
    version: str
    native_macros: frozenset[str]
    link_flags: tuple[str, ...] = ()


class Amx(Enum):
    """How the probe program fared; the value is how one says it."""

    ABSENT = "not used on this CPU"
    DENIED = "not granted by the kernel, so not used"
    SOUND = "compiled correctly"
    BROKEN = "miscompiled"


# A compiler without the shared C++ runtime puts a copy into each of llama.cpp's libraries; where
# the copies see each other, half of one is used with half of another, and the first regex crashes.
HIDE_RUNTIME = ("-Wl,--exclude-libs,libstdc++.a",)

# Dropping the stores is dead store elimination at work; it is done on trees and on RTL.
KEEP_STORES = ("-fno-tree-dse", "-fno-dse")
# A native build takes AMX from these macros, not from CMake options.
WITHOUT_AMX = ("-U__AMX_TILE__", "-U__AMX_INT8__", "-U__AMX_BF16__")


@dataclass(frozen=True, slots=True)
class AmxChoice:
    """The flags that make AMX safe, and why in a sentence."""

    flags: tuple[str, ...]
    note: str


def find_toolchain() -> Toolchain:
    """The compilers of CC and CXX, else the system's own.

    Raises SetupError where none compiles and links a small C++ program.
    """
    named = bool(os.environ.get("CC") or os.environ.get("CXX"))
    pairs = COMPILER_PAIRS
    if named:
        pairs = ((os.environ.get("CC") or "cc", os.environ.get("CXX") or "c++"),)
    for cc, cxx in pairs:
        if shutil.which(shlex.split(cc)[0]) and _compiles(cxx, SMALL_PROGRAM):
            version = _output([*shlex.split(cxx), "--version"]).split("\n", 1)[0]
            return Toolchain(cc, cxx, version, native_macros(cxx), choose_link_flags(cxx))
    if named:
        raise SetupError(
            f"The compilers named by CC and CXX ({pairs[0][0]}, {pairs[0][1]}) do not work.",
            hint="Unset the two, or name compilers that build a C++ program.",
        )
    raise SetupError("No working C++ compiler was found.", hint=how_to_install("compiler"))


def choose_link_flags(cxx: str) -> tuple[str, ...]:
    """The flags that keep copies of the C++ runtime apart, where this compiler makes copies."""

    def has(library: str) -> bool:
        # A name that comes back without a folder is one that the compiler does not find.
        return "/" in _output([*shlex.split(cxx), f"-print-file-name={library}"])

    return HIDE_RUNTIME if has("libstdc++.a") and not has("libstdc++.so") else ()


def native_macros(cxx: str) -> frozenset[str]:
    """The macros that a build for this very CPU has more than one for any CPU of its kind."""
    usual = _macros(cxx)
    for flag in ("-march=native", "-mcpu=native"):
        if native := _macros(cxx, flag):
            return native - usual
    return frozenset()


def _macros(cxx: str, *flags: str) -> frozenset[str]:
    text = _output([*shlex.split(cxx), *flags, "-dM", "-E", "-x", "c++", os.devnull])
    lines = text.splitlines()
    return frozenset(line.split()[1] for line in lines if line.startswith("#define __"))


def probe_amx(cxx: str, flags: Sequence[str] = (), extra: Sequence[str | Path] = ()) -> Amx:
    """Compile the probe as a native build compiles llama.cpp, with `flags` added, and run it.

    `extra`: further sources and flags of a test.
    """
    user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "amx_probe"
        options = ["-O3", "-std=c++17", "-pthread", "-march=native", *user_flags, *flags]
        command = [*shlex.split(cxx), *options, *map(str, extra), str(PROBE), "-o", str(program)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            # Either it knows no -march=native, and then no AMX, or cannot assemble AMX code.
            return Amx.BROKEN if "__AMX_TILE__" in native_macros(cxx) else Amx.ABSENT
        run = subprocess.run([str(program)], capture_output=True, check=False)
    words = {b"absent": Amx.ABSENT, b"denied": Amx.DENIED, b"sound": Amx.SOUND}
    return words.get(run.stdout.strip(), Amx.BROKEN)


def choose_amx_flags(probe: Callable[[Sequence[str]], Amx]) -> AmxChoice:
    """No flags where AMX works or is not used; else those that cure it; else AMX off."""
    found = probe(())
    if found is not Amx.BROKEN:
        return AmxChoice((), f"AMX is {found.value}.")
    if probe(KEEP_STORES) is Amx.SOUND:
        flags = " ".join(KEEP_STORES)
        return AmxChoice(KEEP_STORES, f"This compiler gets AMX wrong; {flags} cures it.")
    return AmxChoice(WITHOUT_AMX, "This compiler gets AMX wrong, so AMX is left out.")


def compile_seconds(cxx: str) -> float:
    """How long a program with heavy headers takes to compile: a yardstick for long builds."""
    begin = time.monotonic()
    _compiles(cxx, YARDSTICK)
    return time.monotonic() - begin


def _compiles(cxx: str, source: str) -> bool:
    """Whether the program can be compiled and linked."""
    if not shutil.which(shlex.split(cxx)[0]):
        return False
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        command = [*shlex.split(cxx), "-O2", "-x", "c++", "-std=c++17", "-", "-o", str(program)]
        run = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
        return run.returncode == 0 and program.exists()


def _output(command: Sequence[str]) -> str:
    """What a command prints, "" where it fails."""
    try:
        run = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.decode("utf-8", "replace")
