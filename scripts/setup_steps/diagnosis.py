"""From a failure to a sentence: the lines of a log that matter, the cause, what to install."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FAILED, USAGE, CANNOT_RUN = 1, 2, 4


class SetupError(Exception):
    """A failure told in one plain sentence, with a hint and the exit code it gives."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = CANNOT_RUN) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


# What a system calls the package that brings a thing, and how it installs one.
INSTALLERS = {
    "debian": "sudo apt install",
    "fedora": "sudo dnf install",
    "arch": "sudo pacman -S",
    "suse": "sudo zypper install",
}
PACKAGES = {
    "compiler": {
        "debian": "build-essential",
        "fedora": "gcc gcc-c++",
        "arch": "base-devel",
        "suse": "gcc gcc-c++",
    },
    "venv": {"debian": "python3-venv", "fedora": "python3", "arch": "python", "suse": "python3"},
    "vulkan": {
        "debian": "libvulkan-dev glslc spirv-headers",
        "fedora": "vulkan-loader-devel glslc spirv-headers-devel",
        "arch": "vulkan-headers vulkan-icd-loader shaderc spirv-headers",
        "suse": "vulkan-devel shaderc spirv-headers",
    },
}
ON_MACOS = {
    "compiler": "xcode-select --install",
    "venv": "brew install python",
    "vulkan": "brew install vulkan-headers vulkan-loader shaderc spirv-headers",
}


def system_family(os_release: str | None = None) -> str:
    """`debian`, `fedora`, `arch`, `suse`, `macos`, or "" where the system is none of these."""
    if os_release is None:
        if sys.platform == "darwin":
            return "macos"
        path = Path("/etc/os-release")
        os_release = path.read_text(encoding="utf-8") if path.exists() else ""
    names = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', os_release, re.MULTILINE)
    words = " ".join(names).replace("opensuse", "suse").replace("rhel", "fedora").split()
    return next((word for word in words if word in INSTALLERS), "")


def how_to_install(what: str, family: str | None = None) -> str:
    """The command that installs one of PACKAGES on this system, or its name on several."""
    family = system_family() if family is None else family
    if family == "macos":
        return ON_MACOS[what]
    if family in INSTALLERS:
        return f"{INSTALLERS[family]} {PACKAGES[what][family]}"
    return " or ".join(f"`{INSTALLERS[f]} {PACKAGES[what][f]}`" for f in ("debian", "fedora"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log says: its telling lines, the cause in a sentence ("" = unknown), and a hint."""

    lines: tuple[str, ...]
    cause: str = ""
    hint: str = ""
    is_out_of_memory: bool = False


TELLING = re.compile(
    r"\b\w*error\b:|\bfatal error\b|CMake Error|undefined reference|\bFAILED:|\bKilled\b|"
    r"No space left|Cannot allocate memory|out of memory|internal compiler error|^ERROR:|"
    r"Could not find|name resolution|Network is unreachable|Connection refused|timed out|"
    r"unsupported GNU version|No such file or directory",
    re.IGNORECASE,
)
# pip's frame around the real error.
NOISE = re.compile(
    r"subprocess-exited-with-error|This error originates from a subprocess|See above for output|"
    r"Failed building wheel|Failed to build|failed-wheel-build|metadata-generation-failed|"
    r"Encountered error while generating|"
    r"ninja: build stopped|CMake build failed"
)
MAX_LINES = 10
MAX_WIDTH = 200

# Pattern, cause, and hint: a text, or the key of PACKAGES whose command is the hint.
MEMORY = r"\bKilled\b|Cannot allocate memory|virtual memory exhausted|out of memory"
CAUSES = (
    (r"No space left", "The disk is full.", "Free 2 GB on the disk, and run again."),
    (
        MEMORY,
        "The compiler ran out of memory.",
        "Close other programs or add swap, then: CMAKE_BUILD_PARALLEL_LEVEL=1 scripts/setup",
    ),
    (
        r"name resolution|Name or service not known|nodename nor servname|Network is unreachable|"
        r"Connection refused|NewConnectionError|Read timed out|ConnectTimeout|ProxyError|"
        r"CERTIFICATE_VERIFY_FAILED|No matching distribution found",
        "The Python package index could not be reached, or lacks a package.",
        "Check the network; a proxy goes into HTTPS_PROXY, a mirror into PIP_INDEX_URL.",
    ),
    (
        r"SPIRV-Headers|Could NOT find Vulkan|vulkan\.h",
        "Parts of the Vulkan toolkit are missing.",
        "vulkan",
    ),
    (
        r"unsupported GNU version",
        "This CUDA toolkit does not take this compiler.",
        "Name an older one, as in CC=gcc-12 CXX=g++-12 scripts/setup; "
        "or without the GPU: HOMESPEC_BACKEND=cpu scripts/setup",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER|not able to compile a simple test|cc1plus.*No such file",
        "The C++ compiler does not work.",
        "compiler",
    ),
    (r"fatal error: .*(No such file|not found)", "A header file is missing.", "compiler"),
)


def telling_lines(log: Iterable[str]) -> tuple[str, ...]:
    """The first ten lines that tell of an error, a CMake error with its text; else the last ten."""
    kept: list[str] = []
    recent: list[str] = []
    follow = 0
    for raw in log:
        line = raw.strip()
        if not line:
            continue
        recent = [*recent[1 - MAX_LINES :], line[:MAX_WIDTH]]
        if NOISE.search(line):
            continue
        is_telling = TELLING.search(line) is not None
        if (is_telling or follow > 0) and line[:MAX_WIDTH] not in kept:
            kept.append(line[:MAX_WIDTH])
        follow = 3 if "CMake Error" in line else follow - 1
        if len(kept) == MAX_LINES:
            break
    return tuple(kept or recent)


def diagnose(log: Iterable[str], *, backend: str = "cpu") -> Diagnosis:
    """Name the cause of a failed download, build or installation, where it is a common one."""
    lines = telling_lines(log)
    text = "\n".join(lines)
    for pattern, cause, hint in CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            command = how_to_install(hint) if hint in PACKAGES else hint
            return Diagnosis(lines, cause, command, is_out_of_memory=pattern == MEMORY)
    without_gpu = "Without the GPU: HOMESPEC_BACKEND=cpu scripts/setup"
    return Diagnosis(lines, hint="" if backend == "cpu" else without_gpu)
