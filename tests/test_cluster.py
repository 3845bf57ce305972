"""A cluster of two workers on this machine; one of them is killed while it works."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

TIMEOUT = 120
ROWS = 160


@pytest.fixture
def scheduler() -> Iterator[str]:
    pytest.importorskip("distributed")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from distributed.cli.dask_scheduler import main; main(sys.argv[1:])",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Scheduler at" in line:
            address = "tcp://" + line.split("tcp://")[1].strip()
            break
    else:
        pytest.fail("the scheduler did not start")
    yield address
    process.terminate()
    process.communicate()


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "homespec", *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_worker_that_is_killed_loses_no_row(scheduler: str, tiny: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"row {i}", "prompt": f"number {i}", "max_tokens": 150}) + "\n"
            for i in range(ROWS)
        )
    )
    model = ["-m", tiny, "-c", "512", "-t", "1"]
    with ExitStack() as stack:
        workers = [start("worker", scheduler, *model, "-np", "2") for _ in range(2)]
        for worker in workers:
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
            assert worker.stderr is not None
            assert any("rows at once" in line for line in worker.stderr)
        run = start(
            "batch", "-i", source, "-o", out, "--cluster", scheduler, "--ignore-eos", "--seed", "1"
        )
        began = time.monotonic()
        while lines(out) < ROWS // 8:
            assert run.poll() is None, run.communicate()[1]
            assert time.monotonic() - began < TIMEOUT
            time.sleep(0.01)
        at_kill = lines(out)
        workers[0].kill()
        _, said = run.communicate(timeout=TIMEOUT)
        assert run.returncode == 0, said
    assert at_kill < ROWS
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(f"row {i}" for i in range(ROWS))
    assert all(row["error"] is None for row in rows)
    # The same rows on this machine are answered alike, and need not be done again.
    again = start("batch", "-i", source, "-o", out, *model, "--ignore-eos", "--seed", "1")
    _, said = again.communicate(timeout=TIMEOUT)
    assert again.returncode == 0
    assert f"{ROWS} done before" in said


def test_a_cluster_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "in").write_text("x\n")
    run = start(
        "batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "--cluster", "tcp://127.0.0.1:1"
    )
    _, said = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 4
    assert "no Dask scheduler" in said
