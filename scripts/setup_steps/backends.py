"""What llama.cpp is built for: CUDA, ROCm, Metal, Vulkan or the CPU alone, and why."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from setup_steps.diagnosis import USAGE, SetupError, how_to_install


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to build: CMake options and environment, the reason, and what is missing for more.

    `identity`: what else decides the binary (toolkit and GPU), for the key of a built wheel.
    """

    name: str
    reason: str
    cmake: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    identity: str = ""
    advice: str = ""


class System:
    """The questions detection asks of a machine; tests answer them for machines they lack."""

    platform: str = sys.platform

    def which(self, name: str, *folders: str) -> str:
        """The path of a program in PATH or in one of the folders, or ""."""
        found = (shutil.which(name, path=path) for path in (None, *folders))
        return next((path for path in found if path), "")

    def output(self, *command: str) -> str:
        """What a command prints, "" where it fails or is missing."""
        try:
            run = subprocess.run(
                command, capture_output=True, check=True, timeout=30, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return run.stdout.decode("utf-8", "replace").strip()

    def exists(self, *patterns: str) -> bool:
        """Whether a file matches one of the patterns."""
        return any(glob.glob(pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Finding:
    """A kind of GPU on this machine: the backend if it can be built, and what was seen."""

    has_device: bool
    missing: str  # "" where the toolkit is whole
    backend: Backend


def _cuda(system: System) -> Finding:
    nvcc = system.which("nvcc", "/usr/local/cuda/bin")
    gpus = system.output(
        system.which("nvidia-smi", "/usr/lib/wsl/lib") or "nvidia-smi",
        "--query-gpu=name,compute_cap",
        "--format=csv,noheader",
    )
    release = re.search(r"release ([\d.]+)", system.output(nvcc, "--version") if nvcc else "")
    return Finding(
        has_device=bool(gpus) or system.exists("/dev/nvidia[0-9]*"),
        missing="" if release else "nvcc, of the CUDA toolkit, is missing",
        backend=Backend(
            "cuda",
            f"CUDA {release.group(1) if release else ''} and {gpus.splitlines()[0].split(',')[0]}"
            if gpus
            else "CUDA",
            {"GGML_CUDA": "ON"},
            {"CUDACXX": nvcc},
            identity=f"{release.group(0) if release else ''} {gpus}",
        ),
    )


def _rocm(system: System) -> Finding:
    folder = "/opt/rocm/bin"
    hipconfig = system.which("hipconfig", folder)
    is_whole = bool(hipconfig) and bool(system.which("hipcc", folder))
    # Without a list of its own GPUs the build would hold code for each one there is.
    names = system.output(system.which("rocm_agent_enumerator", folder) or "rocm_agent_enumerator")
    targets = sorted(set(re.findall(r"\bgfx(?!000)\w+", names)))
    environment = {}
    if is_whole:
        clang = f"{system.output(hipconfig, '-l')}/clang"
        environment = {"HIPCXX": clang, "HIP_PATH": system.output(hipconfig, "-R")}
    return Finding(
        has_device=system.exists("/dev/kfd"),
        missing="" if is_whole else "hipcc, of ROCm, is missing",
        backend=Backend(
            "rocm",
            f"ROCm and {', '.join(targets) or 'an AMD GPU'}",
            {"GGML_HIP": "ON"} | ({"GPU_TARGETS": ";".join(targets)} if targets else {}),
            environment,
            identity=system.output(hipconfig, "--version") if hipconfig else "",
        ),
    )


def _metal(system: System) -> Finding:
    is_mac = system.platform == "darwin"
    return Finding(is_mac, "" if is_mac else "this is not macOS", Backend("metal", "Metal"))


def _vulkan(system: System) -> Finding:
    roots = ["/usr", "/usr/local", "/opt/homebrew"]
    roots += [os.environ["VULKAN_SDK"]] if os.environ.get("VULKAN_SDK") else []
    libraries = [f"{root}/{folder}" for root in roots for folder in ("lib", "lib64", "lib/*")]
    parts = {
        "glslc": bool(system.which("glslc")),
        "the Vulkan headers": system.exists(*(f"{r}/include/vulkan/vulkan.h" for r in roots)),
        "the Vulkan loader": system.exists(*(f"{path}/libvulkan.*" for path in libraries)),
        "the SPIR-V headers": system.exists(
            *(
                f"{path}/cmake/SPIRV-Headers*"
                for path in (*libraries, *(f"{r}/share" for r in roots))
            )
        ),
    }
    absent = [part for part, is_there in parts.items() if not is_there]
    return Finding(
        has_device=system.exists("/dev/dri/renderD*"),
        missing=f"{', '.join(absent)} missing" if absent else "",
        backend=Backend(
            "vulkan",
            "Vulkan and a GPU in /dev/dri",
            {"GGML_VULKAN": "ON"},
            identity=system.output("glslc", "--version"),
        ),
    )


# In order of preference: the vendor's own way first.
FINDERS: Mapping[str, Callable[[System], Finding]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "metal": _metal,
    "vulkan": _vulkan,
}
NAMES = ("cpu", *FINDERS)
TOOLKITS = {"cuda": "the CUDA toolkit", "rocm": "ROCm with hipcc and hipBLAS"}


def cpu(reason: str, advice: str = "", *, platform: str = sys.platform) -> Backend:
    """The backend that needs nothing; on macOS Metal must be switched off for it."""
    metal_off = {"HOMESPEC_METAL": "OFF"} if platform == "darwin" else {}
    return Backend("cpu", reason, metal_off, advice=advice)


def choose_backend(wish: str = "", system: System | None = None) -> Backend:
    """The backend of HOMESPEC_BACKEND (`wish`), else the first whose device and toolkit are there.

    Raises SetupError for an unknown wish, and for one whose toolkit is missing.
    """
    system = system or System()
    if wish and wish not in NAMES:
        raise SetupError(
            f"HOMESPEC_BACKEND={wish} is unknown.",
            hint=f"It may be {', '.join(NAMES)}; unset, the machine decides.",
            exit_code=USAGE,
        )
    if wish == "cpu":
        return cpu("as HOMESPEC_BACKEND asks", platform=system.platform)
    if wish:
        finding = FINDERS[wish](system)
        if finding.missing:
            raise SetupError(
                f"HOMESPEC_BACKEND={wish} cannot be built: {finding.missing}.",
                hint=_install(wish) or "Use HOMESPEC_BACKEND=cpu.",
            )
        return finding.backend
    advice = []
    seen = []
    for name, find in FINDERS.items():
        finding = find(system)
        if finding.has_device and not finding.missing:
            return finding.backend
        if finding.has_device:
            advice.append(
                f"A GPU for {name} is there, but {finding.missing}. "
                f"To use it: {_install(name)}, then run this again."
            )
        elif not finding.missing:
            seen.append(f"{name} is installed, but no GPU for it is here")
    return cpu("; ".join(seen) or "no GPU was found", " ".join(advice), platform=system.platform)


def _install(name: str) -> str:
    if name == "vulkan":
        return how_to_install("vulkan")
    return f"install {TOOLKITS[name]}" if name in TOOLKITS else ""
