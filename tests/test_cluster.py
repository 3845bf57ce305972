"""A cluster of two workers on this machine; one of them is killed while it works."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from homespec.api import Defaults
from homespec.batch.rows import Row
from homespec.batch.work import Outcome
from homespec.cluster.runner import ClusterRunner
from homespec.decoding.sampling import SamplingParams
from homespec.errors import NetworkError
from homespec.generation import GenerateParams

TIMEOUT = 120
ROWS = 160


@pytest.fixture
def scheduler(schedulers: list[subprocess.Popen[str]]) -> str:
    return start_scheduler(schedulers)


@pytest.fixture
def schedulers() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that were started, to be ended."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
        process.communicate()


def start_scheduler(started: list[subprocess.Popen[str]]) -> str:
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
    started.append(process)
    assert process.stderr is not None
    for line in process.stderr:
        if "Scheduler at" in line:
            return "tcp://" + line.split("tcp://")[1].strip()
    pytest.fail("the scheduler did not start")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "homespec", *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_rows(path: Path) -> Path:
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"row {i}", "prompt": f"number {i}", "max_tokens": 150}) + "\n"
            for i in range(ROWS)
        )
    )
    return path


def wait_for_lines(run: subprocess.Popen[str], out: Path, count: int) -> None:
    began = time.monotonic()
    while lines(out) < count:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() - began < TIMEOUT
        time.sleep(0.01)


def test_a_worker_that_is_killed_loses_no_row(
    scheduler: str, tiny: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    source, out = write_rows(tmp_path / "in"), tmp_path / "out"
    model = ["-m", tiny, "-c", "512", "-t", "1"]
    with ExitStack() as stack:
        workers = [start("worker", scheduler, *model, "-np", "2") for _ in range(2)]
        for worker in workers:
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
            assert worker.stderr is not None
            assert any("rows at once" in line for line in worker.stderr)
        batch = ["batch", "-i", source, "-o", out, "--cluster", scheduler, "--ignore-eos"]
        other = start(*batch, "-m", tiny_draft)
        _, said = other.communicate(timeout=TIMEOUT)
        assert other.returncode == 2
        assert "is not what the workers of the cluster hold: that is tiny.gguf" in said
        run = start(*batch, "-m", tiny, "--seed", "1")
        wait_for_lines(run, out, ROWS // 8)
        at_kill = lines(out)
        workers[0].kill()
        _, said = run.communicate(timeout=TIMEOUT)
        assert run.returncode == 0, said
        assert f"{ROWS} rows with tiny.gguf on the workers of {scheduler}" in said
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


def test_a_scheduler_that_is_lost_fails_the_run_and_no_row(
    schedulers: list[subprocess.Popen[str]], tiny: Path, tmp_path: Path
) -> None:
    source, out = write_rows(tmp_path / "in"), tmp_path / "out"
    address = start_scheduler(schedulers)
    with ExitStack() as stack:
        worker = start("worker", address, "-m", tiny, "-c", "512", "-t", "1", "-np", "2")
        stack.callback(worker.communicate)
        stack.callback(worker.kill)
        assert worker.stderr is not None
        assert any("rows at once" in line for line in worker.stderr)
        run = start("batch", "-i", source, "-o", out, "--cluster", address, "--ignore-eos")
        wait_for_lines(run, out, ROWS // 8)
        schedulers[0].kill()
        _, said = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 4, said
    assert "scheduler does not answer any more" in said
    assert "Traceback" not in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert ROWS // 8 <= len(rows) < ROWS
    assert all(row["error"] is None for row in rows)


def test_addresses_and_flags_that_cannot_be_meant(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "in").write_text("x\n")
    model = ["-m", tiny, "-c", "64", "-t", "1", "-np", "2"]
    batch = ["batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "--cluster"]
    for command, word in (
        (["worker", "nowhere://x:1", *model], "nowhere"),
        (["worker", "tls://127.0.0.1:1", *model], "tls://127.0.0.1:1"),
        ([*batch, "nowhere://x:1"], "nowhere"),
        ([*batch, "tls://127.0.0.1:1"], "tls://127.0.0.1:1"),
        ([*batch, "tcp://127.0.0.1:1", "-np", "3"], "-np"),
        ([*batch, "tcp://127.0.0.1:1", "--ctx-size", "64"], "-c"),
    ):
        run = start(*command)
        _, said = run.communicate(timeout=TIMEOUT)
        assert run.returncode == 2, said
        assert word in said
        assert "Traceback" not in said


class FakeFuture:
    """A row in the hands of the cluster."""

    def __init__(self) -> None:
        self.status, self.outcome = "pending", None

    def add_done_callback(self, tell: Callable[[FakeFuture], None]) -> None:
        self.tell = tell

    def end(self, status: str, outcome: Any) -> None:
        self.status, self.outcome = status, outcome

    def result(self, timeout: float) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeClient:
    """A cluster of one worker that does nothing by itself."""

    def __init__(self, *_: object, **__: object) -> None:
        self.status = "running"
        self.futures: list[FakeFuture] = []
        self.workers = {"workers": {"w": {"resources": {"homespec-d": 2}}}}

    def run(self, *_: object, **__: object) -> dict[str, dict[str, str]]:
        return {"w": {"digest": "d", "model": "m.gguf"}}

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return self.workers

    def submit(self, *_: object, **__: object) -> FakeFuture:
        if self.status == "closed":
            raise RuntimeError("Client is closed.")
        self.futures.append(FakeFuture())
        return self.futures[-1]

    def close(self) -> None:
        self.status = "closed"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ClusterRunner:
    comm = SimpleNamespace(get_address_host=lambda _: "x")
    dask = SimpleNamespace(Client=FakeClient, comm=comm)
    monkeypatch.setattr("homespec.cluster.runner.load_dask", lambda: dask)
    monkeypatch.setattr("homespec.cluster.runner._POLL_SECONDS", 0.01)
    return ClusterRunner("tcp://x:1", Defaults(SamplingParams(), GenerateParams()))


ROW = Row(1, "a", "", {})


def handed_out(runner: ClusterRunner) -> FakeFuture:
    runner.submit(ROW)
    future = runner._client.futures[-1]
    assert isinstance(future, FakeFuture)
    return future


def test_a_row_is_waited_for_whose_worker_dies_just_after_it(runner: ClusterRunner) -> None:
    future, answer = handed_out(runner), Outcome(ROW, {})
    future.end("lost", None)  # it was finished when it told so
    future.tell(future)
    assert runner.collect() == []
    future.end("finished", asyncio.TimeoutError())  # and its next worker dies, too
    assert runner.collect() == []
    future.end("pending", None)
    assert runner.collect() == []
    assert not runner.idle
    future.end("finished", answer)
    assert runner.collect() == [answer]
    assert runner.idle


def test_a_row_that_kills_its_workers_is_an_error_row(runner: ClusterRunner) -> None:
    future = handed_out(runner)
    future.end("error", RuntimeError("KilledWorker"))
    future.tell(future)
    [outcome] = runner.collect()
    assert outcome.body is None
    assert "KilledWorker" in outcome.message
    assert runner.idle


def test_what_has_come_is_given_back_before_the_loss_is_told(runner: ClusterRunner) -> None:
    good, lost = handed_out(runner), handed_out(runner)
    good.end("finished", Outcome(ROW, {}))
    lost.end("cancelled", None)
    for future in (lost, good):
        future.tell(future)
    assert len(runner.collect()) == 1
    with pytest.raises(NetworkError):
        runner.collect()


def test_a_client_that_is_cut_off_says_so(runner: ClusterRunner) -> None:
    assert runner.room == 4
    runner._looked = 0.0
    runner._client.workers = {}
    with pytest.raises(NetworkError):
        _ = runner.room
    runner.close()
    with pytest.raises(NetworkError):
        runner.submit(ROW)
