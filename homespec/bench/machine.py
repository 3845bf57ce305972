"""The machine, the versions and the model files of a run, so that two boxes can be compared."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import psutil

from homespec import __version__
from homespec.doctor import build_record
from homespec.engine import Engine
from homespec.llama.devices import cpu_name, devices, num_threads
from homespec.llama.library import build_features, version
from homespec.models.files import remembered_sha256
from homespec.models.references import shard_names


def describe(engine: Engine) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    draft = engine.draft_context.model.path if engine.draft_context is not None else None
    return {
        "cpu": cpu_name(),
        "cores_used": engine.params.threads or num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": [device.description for device in devices() if device.offloads],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "homespec": __version__,
            "llama-cpp-python": version(),
            "Python": platform.python_version(),
        },
        "build": {**build_record(), "features": build_features()},
        "files": {
            role: _file(path)
            for role, path in (("target", engine.model.path), ("draft", draft))
            if path is not None
        },
    }


def _file(path: Path) -> dict[str, Any]:
    """Name, size and digest; of a model in parts, the digest of each."""
    parts = [path.with_name(name) for name in shard_names(path.name)]
    return {
        "name": path.name,
        "size_bytes": sum(part.stat().st_size for part in parts),
        "sha256": ",".join(remembered_sha256(part) for part in parts),
    }
