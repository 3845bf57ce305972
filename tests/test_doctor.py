"""The self-test in its child: passing, failing, and dying."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from homespec.doctor import FEATURES, diagnose
from homespec.llama.library import build_features, has_own_kernels


def test_a_sound_build_passes_every_stage(tiny: Path) -> None:
    found = diagnose(tiny, {"flash_attention": "on"})
    assert found.problem is None
    assert {"library", "load", "decode", "widths"} <= found.stages.keys()
    assert found.stages["library"]["own_kernels"] == has_own_kernels()
    assert found.versions["llama-cpp-python"][0].isdigit()
    built = set(build_features()["CPU"]) & FEATURES.keys()
    assert built == {row.name for row in found.features if row.in_build}


def test_a_model_that_does_not_load_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUFnot really")
    found = diagnose(tmp_path / "bad.gguf", {})
    assert found.problem is not None
    assert "bad.gguf" in found.problem


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("sys.exit('something else')", "something else"),
    ],
)
def test_a_child_that_dies_is_a_sentence_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, words: str
) -> None:
    """A real process in the place of the interpreter: it says one stage, then dies."""
    stage = json.dumps({"stage": "library", "version": "0"})
    child = tmp_path / "python"
    child.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nprint('{stage}', flush=True)\n{ending}\n"
    )
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    found = diagnose(tmp_path / "model.gguf", {})
    assert found.problem is not None
    assert words in found.problem
    assert "'load'" in found.problem
    assert found.cure is not None
    assert "scripts/setup" in found.cure
