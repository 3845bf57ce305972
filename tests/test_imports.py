"""Imports go downwards only, and each outside dependency has one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "homespec"

FLOORS = {
    "errors": 0,
    "paths": 0,
    "closing": 0,
    "disk": 0.5,
    "decoding": 1,
    "drafters": 2,
    "llama": 2,
    "models": 2,
    "tuning": 3,
    "generation": 3,
    "speculation": 4,
    "tuned": 4,
    "planning": 3,
    "checking": 4.2,
    "loading": 4.5,
    "fetching": 4.8,
    "engine": 5,
    "scheduling": 5,
    "api": 5.5,
    "shelf": 5,
    "chat": 6,
    "batch": 6,
    "server": 6,
    "selftest": 5,
    "doctor": 6,
    "trial": 6,
    "tune": 6,
    "setup": 6.5,  # runs doctor and trial
    "bench": 6.5,  # tells doctor's record of the build
    "cluster": 6.5,
    "console": 7,
    "cli": 7,
}
DOORS = {
    "llama_cpp": ("llama/",),
    "huggingface_hub": ("models/sources.py",),
    "yaml": ("models/catalog.py",),
    "distributed": ("cluster/connection.py",),
    "dask": ("cluster/connection.py",),
    "starlette": ("server/",),
    "uvicorn": ("server/serving.py",),
    "prometheus_client": ("server/metrics.py",),
    "rich": ("console.py", "cli.py", "cli/"),
    "click": ("console.py", "cli.py", "cli/"),
    "markdown_it": ("cli/",),
    "prompt_toolkit": ("cli/",),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """`homespec.llama.model` -> `llama`."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
            if node.module == "homespec":
                found += [f"homespec.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_and_through_the_doors(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    assert own in FLOORS, f"{relative} stands on no floor: add it to FLOORS"
    for module in imports_of(path):
        root = module.split(".")[0]
        if root in DOORS:
            assert str(relative).startswith(DOORS[root]), f"{relative} imports {root}"
        other = part_of(module) if root == "homespec" else ""
        if other in FLOORS and other != own:
            assert FLOORS[other] < FLOORS[own] or FLOORS[own] == 7, f"{relative} imports {module}"
