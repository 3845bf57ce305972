"""All that decides what the built library holds, and the key that names it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setup_steps.backends import Backend
from setup_steps.toolchain import AmxChoice, Toolchain

INCLUDE = Path(__file__).with_name("llama.cmake")
KERNELS = Path(__file__).with_name("kernels")
ADDED_TO_BUILD = (INCLUDE, *sorted(KERNELS.glob("[a-z]*.[ch]*")))
_OF_CMAKE = ("CUDAARCHS", "CMAKE_TOOLCHAIN_FILE", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")
BUILD_VARIABLES = (
    "CMAKE_ARGS",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDAFLAGS",
    "HIPFLAGS",
    *_OF_CMAKE,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what the built library holds."""

    version: str
    backend: Backend
    toolchain: Toolchain
    amx: AmxChoice
    variables: Mapping[str, str]

    @property
    def key(self) -> str:
        """The same for every Python and every clone, other for another compiler, CPU or flag."""
        parts = (
            self.version,
            *(path.read_text(encoding="utf-8") for path in ADDED_TO_BUILD),
            self.settings(),
            self.backend.identity,
            self.toolchain.version,
            sorted(self.toolchain.native_macros),
            (*self.amx.flags, *self.toolchain.link_flags),
            sorted(self.variables.items()),
            platform.system(),
            platform.machine(),
        )
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        return f"{self.version}-{self.backend.name}-{digest}"

    def settings(self) -> list[str]:
        """The build backend's settings, apart from paths."""
        defines = {"LLAVA_BUILD": "OFF", **self.backend.cmake}
        return [
            *(f"cmake.define.{name}={value}" for name, value in defines.items()),
            # make would compile one file at a time; ninja comes from the index where it is missing
            "ninja.make-fallback=false",
            # second and third copies of the libraries, and headers for C++ programs
            "wheel.exclude=/lib/;/include/;/bin/;*.so.*.*.*;*.*.*.*.dylib",
        ]

    def environment(self, jobs: int) -> dict[str, str]:
        """The environment of the build."""
        flags = " ".join(self.amx.flags)
        link_flags = " ".join(self.toolchain.link_flags)
        added = {
            "CC": self.toolchain.cc,
            "CXX": self.toolchain.cxx,
            "CFLAGS": f"{self.variables.get('CFLAGS', '')} {flags}".strip(),
            "CXXFLAGS": f"{self.variables.get('CXXFLAGS', '')} {flags}".strip(),
            "LDFLAGS": f"{self.variables.get('LDFLAGS', '')} {link_flags}".strip(),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
            **self.backend.environment,
        }
        # With this one set ggml builds for any CPU of the kind, and not for this one.
        kept = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
        return {**kept, **{name: value for name, value in added.items() if value}}

    def record(self) -> dict[str, object]:
        """What `homespec doctor` shows of the build."""
        return {
            "version": self.version,
            "backend": self.backend.name,
            "backend_reason": self.backend.reason,
            "compiler": self.toolchain.version,
            "amx": self.amx.note,
            "added_flags": [*self.amx.flags, *self.toolchain.link_flags],
            "settings": self.settings(),
            "variables": dict(self.variables),
            "native_macros": sorted(self.toolchain.native_macros),
            "machine": platform.machine(),
        }


def make_recipe(version: str, backend: Backend, toolchain: Toolchain, amx: AmxChoice) -> Recipe:
    """The recipe under the present environment."""
    variables = {name: os.environ[name] for name in BUILD_VARIABLES if os.environ.get(name)}
    return Recipe(version, backend, toolchain, amx, variables)
