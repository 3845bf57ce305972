"""Looks at the machine and at the build of llama.cpp, and tries a decode in a child process."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homespec import __version__
from homespec.selftest import STAGES

TIMEOUT_SECONDS = 600

FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""ggml's name of an instruction set -> Linux's."""


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """An instruction set: whether the processor has it and whether the build uses it."""

    name: str
    in_cpu: bool
    in_build: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found. `stages` holds what each stage of the self-test said.

    problem and cure: a sentence each, None where all is well.
    """

    versions: dict[str, str]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str | None = None
    cure: str | None = None

    @property
    def features(self) -> list[FeatureRow]:
        """Instruction sets that the processor or the build knows."""
        library = self.stages.get("library", {})
        has, uses = library.get("cpu_features", []), library.get("build_features", {})
        rows = [
            FeatureRow(name, linux in has, name in uses.get("CPU", []))
            for name, linux in FEATURES.items()
        ]
        return [row for row in rows if row.in_cpu or row.in_build]


def diagnose(model: Path, settings: dict[str, Any]) -> Diagnosis:
    """Run the self-test on a model with the given fields of ContextParams."""
    command = [sys.executable, "-m", "homespec.selftest", str(model), json.dumps(settings)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        output, code, stderr = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as exc:
        output, code, stderr = _text(exc.stdout), None, ""
    said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    stages = {entry.pop("stage"): entry for entry in said}
    problem, cure = _verdict(stages, code, stderr)
    return Diagnosis(_versions(stages), stages, problem, cure)


def _verdict(
    stages: dict[str, dict[str, Any]], code: int | None, stderr: str
) -> tuple[str | None, str | None]:
    doing = next((stage for stage in STAGES if stage not in stages), None)
    rebuild = "Build it again for this machine: ./scripts/setup"
    if code is None:
        problem = f"The self-test hung at the stage {doing!r}."
    elif code == -signal.SIGILL:
        problem = (
            f"llama.cpp met an instruction it cannot run (SIGILL) at the stage {doing!r}: "
            "it was built for another processor, or miscompiled."
        )
    elif code < 0:
        problem = f"llama.cpp crashed ({signal.Signals(-code).name}) at the stage {doing!r}."
    elif "error" in stages:
        return stages["error"]["message"], stages["error"]["hint"]
    elif code:
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"The self-test failed at the stage {doing!r}: {last}"
    elif not stages["decode"]["finite"]:
        problem = "The self-test decoded numbers that are not finite."
    else:
        return None, None
    return problem, rebuild


def _versions(stages: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {
        "homespec": __version__,
        "llama-cpp-python": stages.get("library", {}).get("version", "not loaded"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **build_record(),
    }


def build_record() -> dict[str, str]:
    """What scripts/setup noted of its build; nothing where the library came another way."""
    try:
        build = json.loads((Path(sys.prefix) / "homespec-build.json").read_text())["build"]
        return {
            "built for": f"{build['backend']} ({build['backend_reason']})",
            "compiler": str(build["compiler"]),
            "AMX": str(build["amx"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _text(output: bytes | str | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""
