"""The memory plan against the truth, as the script that prints the whole table measures it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PairFiles
from tests.tiny_gguf import write_tiny_gguf

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure-memory"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process"
)


def measure(*args: object) -> str:
    """The table, once every ratio in it is within the bound."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--last", "16", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HOMESPEC_TEST_PAIR": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cost_of_passes_is_printed_without_a_device_too(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", context_length=4096)
    script = SCRIPT.with_name("measure-device")
    table = subprocess.check_output([sys.executable, script, "--model", tiny], text=True)
    for name in ("repeated", "in turn"):
        [figures] = re.findall(rf"^{name} +(.*)  ms$", table, re.MULTILINE)
        assert len(figures.split()) == 12
        assert all(float(figure) > 0 for figure in figures.split())


def test_the_starter_grows_by_what_is_predicted() -> None:
    table = measure("--contexts", "512,4096", "--cache-types", "f16")
    ratios = [float(ratio) for ratio in re.findall(r"MiB +([\d.]+)$", table, re.MULTILINE)]
    assert len(ratios) == 2
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios)


def test_the_reference_pair_grows_by_what_is_predicted(pair: PairFiles) -> None:
    files = ["--target", pair.target, "--draft", pair.draft]
    table = measure(*files, "--contexts", "512", "--cache-types", "f16")
    assert "largest error" in table
