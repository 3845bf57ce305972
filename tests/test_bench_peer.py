"""A server beside the engine: asked the same, timed by both clocks, and told where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from homespec.bench.arms import parse_arms
from homespec.bench.output import as_dict
from homespec.bench.peer import Peer
from homespec.bench.runner import BenchParams, run
from homespec.bench.summary import figures_of, verdicts
from homespec.decoding.sampling import SamplingParams
from homespec.errors import NetworkError, UsageError

from tests.bench_models import PROMPTS, tiny_bench_engine

GREEDY = SamplingParams(temperature=0, seed=1)
ASK = ({"role": "user", "content": "Hello"},)
TOKEN_SECONDS = 0.02


class Handler(BaseHTTPRequestHandler):
    """Streams `max_tokens` words, one every TOKEN_SECONDS; `server.manner` makes it misbehave."""

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        manner = self.server.manner  # type: ignore[attr-defined]
        if manner == "strict" and "ignore_eos" in asked:
            self.send_error(400)
            return
        if manner == "refuses":
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if manner == "nonsense":
            self.wfile.write(b"data: {nonsense\n\n")
            return
        if manner == "error":
            self._event({"error": {"message": "out of memory"}})
            return
        count = 0 if manner == "silent" else asked["max_tokens"]
        self._event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
        for _ in range(count):
            time.sleep(TOKEN_SECONDS)
            self._event({"choices": [{"delta": {"content": "word "}}]})
        usage = {"prompt_tokens": 9, "completion_tokens": count}
        timings = {"prompt_per_second": 450.0, "predicted_per_second": 1 / TOKEN_SECONDS}
        self._event({"choices": [], "usage": usage, "timings": timings})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, values: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(values).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def serving(manner: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.manner = [], manner  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_both_clocks_are_told() -> None:
    with serving() as (url, asked), Peer(url) as peer:
        found = peer.answer(ASK, GREEDY, 10)
    assert found.text == "word " * 10
    assert (found.num_prompt_tokens, found.num_tokens) == (9, 10)
    assert TOKEN_SECONDS <= found.first_token_seconds < found.seconds
    assert found.seconds >= 10 * TOKEN_SECONDS
    assert found.reported["decode_tokens_per_second"] == 1 / TOKEN_SECONDS
    [request] = asked
    assert request["model"] == "first"
    assert request["messages"] == list(ASK)
    assert (request["max_tokens"], request["temperature"], request["seed"]) == (10, 0, 1)
    assert request["ignore_eos"]
    assert not request["cache_prompt"]


def test_a_server_that_knows_openais_fields_only_is_asked_with_these() -> None:
    with serving("strict") as (url, asked), Peer(url, "mine") as peer:
        assert peer.answer(ASK, GREEDY, 3).num_tokens == 3
        peer.answer(ASK, GREEDY, 3)
    assert ["ignore_eos" in request for request in asked] == [True, False, False]
    assert asked[0]["model"] == "mine"


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        ("refuses", "answered 401"),
        ("nonsense", "no answer of an OpenAI-compatible server"),
        ("error", "no answer of an OpenAI-compatible server"),
        ("silent", "empty answer"),
    ],
)
def test_failures_are_plain_sentences(manner: str, said: str) -> None:
    with serving(manner) as (url, _), Peer(url) as peer, pytest.raises(NetworkError, match=said):
        peer.answer(ASK, GREEDY, 3)


def test_nobody_there() -> None:
    with serving() as (url, _):
        pass
    with pytest.raises(NetworkError, match="cannot be reached"):
        Peer(url)
    with pytest.raises(UsageError, match="no address"):
        Peer("localhost:8080")


def test_a_server_is_one_more_arm(tiny: Path, tiny_draft: Path) -> None:
    with (
        serving() as (url, asked),
        Peer(url) as peer,
        tiny_bench_engine(tiny, tiny_draft) as engine,
    ):
        arms = parse_arms(["plain", "auto"], url)
        found = run(engine, arms, PROMPTS, BenchParams(max_tokens=6), peer=peer)
    assert len(asked) == len(PROMPTS) + 1  # the warm-up is not counted
    assert [request["messages"] for request in asked[1:]] == [list(p.messages) for p in PROMPTS]
    figures = figures_of(found, 2)
    assert figures.num_runs == len(PROMPTS)
    assert figures.reported["prompt_tokens_per_second"] == 450.0
    assert figures.decode_tokens_per_second == pytest.approx(1 / TOKEN_SECONDS, rel=0.5)
    assert f"server at {url} is slower than plain" in verdicts(found)[1]
    assert json.dumps(as_dict(found))
    with tiny_bench_engine(tiny, tiny_draft) as engine, pytest.raises(UsageError):
        run(engine, arms, PROMPTS)


@contextmanager
def llama_server(program: Path, model: Path, folder: Path) -> Iterator[str]:
    """The server of llama.cpp on a free port, once it is ready."""
    with serving() as (free, _):
        port = free.split(":")[2].split("/")[0]
    command = [
        program,
        "-m",
        model,
        "--port",
        port,
        "-c",
        "2048",
        "-np",
        "1",
        "-t",
        "1",
        "--offline",
    ]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(20)


def test_llama_server_is_measured(starter: Path, tmp_path: Path) -> None:
    program = Path(os.environ.get("HOMESPEC_TEST_LLAMA_SERVER") or "/nonexistent")
    if not program.is_file():
        pytest.skip("HOMESPEC_TEST_LLAMA_SERVER names no llama-server")
    with llama_server(program, starter, tmp_path) as url, Peer(url) as peer:
        first = peer.answer(ASK, GREEDY, 24)
        again = peer.answer(ASK, GREEDY, 24)
    for one in (first, again):
        assert one.num_tokens == 24  # ignore_eos: no shorter
        by_client = (one.num_tokens - 1) / (one.seconds - one.first_token_seconds)
        assert one.reported["decode_tokens_per_second"] == pytest.approx(by_client, rel=0.3)
        assert one.reported["prompt_tokens_per_second"] > 0
    assert first.text == again.text
    assert again.first_token_seconds > 0.3 * first.first_token_seconds  # its cache was not kept
