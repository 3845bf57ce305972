"""The parts of the server by themselves."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from homespec.api import Defaults
from homespec.cli import serve
from homespec.decoding.sampling import SamplingParams
from homespec.engine import Engine
from homespec.errors import CannotRunError, OutOfMemoryError, UsageError
from homespec.generation import GenerateParams
from homespec.llama.library import library
from homespec.loading import LoadParams
from homespec.models.machine import MemoryLimit
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.job import Request
from homespec.scheduling.service import Service
from homespec.server import answering, residency
from homespec.server.admission import Admission
from homespec.server.app import Gate, Server
from homespec.server.errors import ApiError
from homespec.server.host import Host
from homespec.server.keys import Keys
from homespec.server.limits import parse
from homespec.server.openapi import document
from homespec.server.residency import LOOKS, Residency
from homespec.server.serving import check_exposure
from homespec.server.settings import Limits, ServerParams
from homespec.server.sse import PING
from homespec.server.tools import Held, Tools
from starlette.datastructures import URL
from starlette.requests import Request as HttpRequest

from tests.test_server import TOOL_TEMPLATE
from tests.tiny_gguf import write_tiny_gguf

GIB = 1 << 30
DEFAULTS = Defaults(SamplingParams(temperature=0), GenerateParams())
WEATHER = {"name": "weather", "parameters": {"type": "object"}}


def tools(choice: str = "auto") -> Tools:
    return Tools((WEATHER, {"name": "clock"}), choice, Limits())


def load(
    tiny: Path, draft: Path | None = None, n_ctx: int = 128, parallel: int = 2
) -> ParallelEngine:
    params = LoadParams(n_ctx=n_ctx, threads=1)
    return ParallelEngine(tiny, params, draft=draft, parallel=parallel, keep=2)


def asgi(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://localhost")


def test_keys_are_compared_by_their_hashes(tmp_path: Path) -> None:
    assert Keys().admit(None)
    file = tmp_path / "keys"
    file.write_text(f"# mine\n\nsha256:{hashlib.sha256(b'from the file').hexdigest()}\n")
    keys = Keys.of(["by the flag"], file)
    assert keys.admit("Bearer by the flag")
    assert keys.admit("bearer from the file")
    for wrong in (None, "", "Bearer", "Bearer by the fla", "Basic by the flag", "Bearer é"):
        assert not keys.admit(wrong)
    for text in ("", "# none\n", "by the flag\n"):
        file.write_text(text)
        with pytest.raises(UsageError):
            Keys.of([], file)


def test_exposure() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_exposure(host, Keys(), allowed=False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "home.example"):
        check_exposure(host, Keys.of(["a long key"]), allowed=False)
        check_exposure(host, Keys(), allowed=True)
        with pytest.raises(UsageError):
            check_exposure(host, Keys(), allowed=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff{}",
        b"[1]",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\udc00"}',
        b'{"\\ud800": 1}',
        b'{"a": ' + b"[" * 49 + b"]" * 49 + b"}",
        b"[" * 10**6,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, Limits())
    assert caught.value.status == 400


def test_a_body_as_deep_as_allowed() -> None:
    depth = Limits().json_depth - 2
    assert parse(b'{"a": ' + b"[" * depth + b"]" * depth + b"}", Limits())


def test_the_queue_is_bounded() -> None:
    admission = Admission(queue=1)
    admission.parallel = 2
    with admission.admit(2), admission.admit(1):
        with pytest.raises(ApiError) as caught, admission.admit(1):
            pass
        assert caught.value.status == 429
        assert caught.value.retry_after >= 1
    with admission.admit(9):  # more than ever fits is let in when nobody else is there
        assert admission.num_open == 9
    assert admission.num_open == 0


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_calls_are_read_between_tags_and_bare() -> None:
    content, [call] = tools().read(f"I look.\n{CALL}")
    assert content == "I look."
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert len(tools().read(CALL + CALL)[1]) == 2
    bare = '{"name": "clock", "parameters": {"zone": 1}}'
    content, [call] = tools().read(bare)
    assert (content, call["function"]["arguments"]) == ("", '{"zone": 1}')
    assert len(tools().read(f"<|python_tag|>{bare}")[1]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Nothing to call.",
        '{"name": "other", "arguments": {}}',
        '{"city": "Oslo"}',
        "<tool_call>\nnonsense\n</tool_call>",
        "3",
        "[]",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert tools().read(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"I look. {CALL}", "I look. "),
        (CALL, ""),
        ("a < b and <tool_calm>", "a < b and <tool_calm>"),
        ('{"name": "clock"}', ""),
        ("<b>bold</b>", "<b>bold</b>"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_a_stream_holds_back_what_may_be_a_call(text: str, shown: str) -> None:
    for size in (1, 2, 5, 100):
        held = Held(tools())
        pieces = [held.push(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(pieces) == shown
        assert "".join(pieces) + held.rest == text


def test_tools_refer_each_to_its_own_parts() -> None:
    def tool(name: str, city: str) -> dict[str, Any]:
        parts = {"City": {"enum": [city]}, "a/b": {"$ref": "#/$defs/City"}}
        schema = {"properties": {"at": {"$ref": "#/$defs/a~1b"}, "next": {"$ref": "#"}}}
        return {"name": name, "parameters": {"type": "object", "$defs": parts, **schema}}

    both = Tools((tool("go", "Oslo"), tool("stay", "Rome")), "required", Limits()).grammar(None)
    assert "Oslo" in both
    assert "Rome" in both
    for reference in ("#/$defs/nothing", "#City"):
        lost = {"name": "lost", "parameters": {"properties": {"at": {"$ref": reference}}}}
        with pytest.raises(UsageError, match="have no"):
            Tools((lost,), "required", Limits()).grammar(None)


def test_health_while_loading_and_after_a_failure(tiny: Path) -> None:
    may_go_on, outcome = threading.Event(), [True]

    def slowly() -> ParallelEngine:
        may_go_on.wait(30)
        if not outcome.pop():
            raise OutOfMemoryError("There is no memory.")
        return load(tiny)

    async def check() -> None:
        host = Host(slowly, "tiny")
        server = Server(host, DEFAULTS, ServerParams(), Keys(), 0)
        body = {"prompt": "sea", "max_tokens": 2}
        async with asgi(server) as client:
            assert (await client.get("/health")).status_code == 503
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            may_go_on.set()
            assert (await waiting).status_code == 200
            assert (await client.get("/health")).json()["model"] == "ready"
            outcome.append(False)
            assert await host.let_go()
            failed = await client.post("/v1/completions", json=body)
            assert failed.status_code == 503
            assert failed.json()["error"]["message"] == "There is no memory."
            assert (await client.get("/health")).status_code == 503
            outcome.append(True)
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.get("/health")).status_code == 200
        await host.close()

    asyncio.run(check())


def test_short_memory_takes_draft_then_caches_then_the_model(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "CALM_SECONDS", 0.0)
    monkeypatch.setattr(residency, "WATCH_SECONDS", 0.0)
    free = [4 * GIB]

    def memory() -> MemoryLimit:
        return MemoryLimit("machine", 16 * GIB, free[0])

    async def check() -> None:
        host = Host(lambda: load(tiny, tiny_draft), "tiny")
        server = Server(host, DEFAULTS, ServerParams(reserve_bytes=GIB), Keys(), 0)
        server.residency = watch = Residency(host, ServerParams(reserve_bytes=GIB), memory)
        body = {"prompt": "once upon a time", "max_tokens": 12, "ignore_eos": True}

        async def looks(count: int = LOOKS) -> None:
            for _ in range(count):
                await watch.look()

        async with asgi(server) as client:

            async def answer() -> str:
                answered = await client.post("/v1/completions", json=body)
                assert answered.status_code == 200
                return str(answered.json()["choices"][0]["text"])

            async def health() -> dict[str, Any]:
                return dict((await client.get("/health")).json())

            expected = await answer()
            await looks(9)
            assert (await health())["memory"]["given_up"] == []
            assert host.resident.engine.draft_context is not None
            cells = host.resident.engine.cache.num_cells
            free[0] = GIB // 2
            await looks(LOOKS - 1)  # a moment's need is none
            assert host.resident.engine.draft_context is not None
            await looks(1)
            assert (await health())["memory"]["given_up"] == ["draft"]
            assert (await health())["memory"]["short"]
            assert host.resident.engine.draft_context is None
            assert await answer() == expected
            await looks()
            assert (await health())["memory"]["given_up"] == ["draft", "prefix caches"]
            assert host.resident.engine.cache.num_cells < cells
            assert await answer() == expected
            free[0] = 4 * GIB  # enough again: all of it comes back
            await looks(2)
            assert (await health())["memory"]["given_up"] == []
            assert host.resident.engine.cache.num_cells == cells
            assert host.resident.engine.draft_context is not None
            free[0] = GIB // 2
            while host.resident is not None:
                await looks(1)
            assert (await health())["memory"]["given_up"] == []
            assert (await health())["model"] == "let go"
            assert await answer() == expected
        await host.close()

    asyncio.run(check())


def test_a_draft_can_go_while_it_drafts(tiny: Path, tiny_draft: Path) -> None:
    params = GenerateParams(
        max_tokens=60, ignore_eos=True, spec_type="draft_model", depth="fixed", draft_depth=3
    )
    request = Request([50, 51, 52], SamplingParams(temperature=0, seed=1), params)
    with load(tiny, tiny_draft) as engine:
        whole = engine.scheduler.submit(request)
        while not whole.done:
            engine.scheduler.step()
        job = engine.scheduler.submit(request)
        while job.num_tokens < 20:
            engine.scheduler.step()
        assert engine.drop_draft()
        assert not engine.drop_draft()
        while not job.done:
            engine.scheduler.step()
    assert whole.result.stats.drafted_by_source.get("draft_model", 0) > 0
    assert job.result.tokens == whole.result.tokens


def test_what_runs_keeps_the_cells_of_ended_conversations(tiny: Path) -> None:
    sampling, params = SamplingParams(temperature=0, seed=1), GenerateParams(ignore_eos=True)
    with load(tiny) as engine:
        ended = engine.scheduler.submit(Request([50] * 20, sampling, replace(params, max_tokens=2)))
        while not ended.done:
            engine.scheduler.step()
        running = engine.scheduler.submit(Request([51, 52], sampling, params))
        while running.num_tokens < 5:
            engine.scheduler.step()
        free = engine.cache.num_free
        assert not engine.shrink()
        assert engine.cache.num_free == free
        while not running.done:
            engine.scheduler.step()
        assert engine.shrink()
        assert engine.cache.num_free == engine.cache.num_cells == engine.row_ctx


def test_penalties_reach_as_far_as_the_context(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[int] = []
    make = library().llama_sampler_init_penalties

    def noted(n_vocab: int, window: int, *rest: float) -> Any:
        windows.append(window)
        return make(n_vocab, min(window, 128), *rest)

    monkeypatch.setattr(library(), "llama_sampler_init_penalties", noted)
    sampling = SamplingParams(repeat_penalty=1.1, repeat_last_n=2**31 - 1, seed=1)
    params = GenerateParams(max_tokens=2, spec_type="draft_model", rule="rejection")
    with load(tiny, tiny_draft) as engine:
        engine.scheduler.submit(Request([50, 51], sampling, params))
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128, threads=1)) as alone:
        alone.generate("sea", sampling=sampling, max_tokens=2, rule="rejection")
    assert windows
    assert set(windows) == {128}


def test_a_service_outlives_what_is_wrong_with_a_request(tiny: Path) -> None:
    with load(tiny) as engine:
        service = Service(engine.scheduler)
        good = Request(
            [50, 51], SamplingParams(temperature=0, seed=1), GenerateParams(max_tokens=3)
        )
        bad = Request([50, "x"], SamplingParams(seed=1))  # type: ignore[list-item]
        with pytest.raises(TypeError):
            service.submit(bad).result.result(10)
        assert len(service.submit(good).result.result(10).tokens) <= 3
        with pytest.raises(CannotRunError):
            service.call(lambda: (_ for _ in ()).throw(CannotRunError("no"))).result(10)
        assert service.call(lambda: 7).result(10) == 7
        service.close()


def test_the_document_names_every_route(tiny: Path) -> None:
    described = document(Limits())
    json.dumps(described)
    server = Server(Host(lambda: load(tiny), "tiny"), DEFAULTS, ServerParams(), Keys(), 0)
    assert isinstance(server.app, Gate)
    routes = {route.path for route in server.app._app.routes}
    assert routes - {"/openapi.json"} == {
        path.replace("{name}", "{name:path}") for path in described["paths"]
    }
    for path in described["paths"].values():
        for operation in path.values():
            assert "200" in operation["responses"]


def test_a_body_that_does_not_come(tiny: Path) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"prompt"'
        await asyncio.sleep(5)

    async def check() -> None:
        params = ServerParams(limits=Limits(body_seconds=0.2))
        server = Server(Host(lambda: load(tiny), "tiny"), DEFAULTS, params, Keys(), 0)
        async with asgi(server) as client:
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content=slowly(), headers=headers)
            assert answer.status_code == 408

    asyncio.run(check())


def test_a_host_header_opens_no_door(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def url(request: HttpRequest) -> URL:  # as Starlette had it before 1.0
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(HttpRequest, "url", property(url))

    async def check() -> None:
        keys = Keys.of(["a long key"], None)
        server = Server(Host(lambda: load(tiny), "tiny"), DEFAULTS, ServerParams(), keys, 0)
        async with asgi(server) as client:
            answer = await client.get("/v1/models", headers={"host": "a/health?"})
            assert answer.status_code == 401

    asyncio.run(check())


@pytest.mark.parametrize(
    ("flags", "admitted", "refused"),
    [
        ([], ("localhost", "127.0.0.1:8080", "[::1]:80"), ("evil.example", "nas", "")),
        (["--host", "127.0.0.2"], ("127.0.0.2:8080", "localhost"), ("evil.example",)),
        (
            ["--host", "0.0.0.0", "--no-api-key", "--allow-host", "NAS"],
            ("nas:80", "192.168.1.2"),
            ("evil.example", "192.168.1.2.evil.example"),
        ),
        (["--host", "nas.lan", "--no-api-key"], ("nas.lan",), ("evil.example",)),
    ],
    ids=str,
)
def test_names_of_a_server_without_keys(
    tiny: Path, flags: list[str], admitted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    given = serve.command.make_context("serve", flags).params
    params = serve._params(given, guarded=False)

    async def check() -> None:
        server = Server(Host(lambda: load(tiny), "tiny"), DEFAULTS, params, Keys(), 0)
        async with asgi(server) as client:
            for names, status in ((admitted, 200), (refused, 403)):
                for name in names:
                    answer = await client.get("/v1/models", headers={"host": name})
                    assert (answer.status_code, name) == (status, name)

    asyncio.run(check())


def test_a_seed_of_the_command_holds_where_a_request_has_none(tiny: Path) -> None:
    async def check() -> None:
        defaults = Defaults(SamplingParams(temperature=2, seed=5), GenerateParams())
        host = Host(lambda: load(tiny), "tiny")
        async with asgi(Server(host, defaults, ServerParams(), Keys(), 0)) as client:

            async def text(**more: int) -> str:
                body = {"prompt": "sea", "max_tokens": 16, "ignore_eos": True, **more}
                answer = await client.post("/v1/completions", json=body)
                return str(answer.json()["choices"][0]["text"])

            assert await text() == await text() == await text(seed=5)
            assert await text(seed=6) != await text(seed=5)
            assert len({await text(seed=-1) for _ in range(3)}) == 3
        await host.close()

    asyncio.run(check())


def test_a_stream_that_holds_text_back_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", chat_template=TOOL_TEMPLATE)
    seconds = itertools.count(step=20.0)

    async def check() -> None:
        host = Host(lambda: load(model, n_ctx=512), "tiny")
        server = Server(host, DEFAULTS, ServerParams(time_limit=1e6), Keys(), 0)
        async with host.use():  # what loads it takes no time of the request
            monkeypatch.setattr(answering, "clock", lambda: next(seconds))
            schema = {"properties": {"text": {"type": "string", "minLength": 60}}}
            function = {"name": "say", "parameters": {**schema, "required": ["text"]}}
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
                "stream": True,
            }
            async with asgi(server) as client:
                answer = await client.post("/v1/chat/completions", json=body)
        assert answer.text.count(PING) >= 10
        await host.close()

    asyncio.run(check())


def test_the_wait_for_a_place_counts_for_the_first_token(tiny: Path) -> None:
    name = "homespec_time_to_first_token_seconds_sum"

    async def check() -> None:
        host = Host(lambda: load(tiny, n_ctx=512, parallel=1), "tiny")
        server = Server(host, DEFAULTS, ServerParams(), Keys(), 0)
        body = {"prompt": "sea", "max_tokens": 200, "ignore_eos": True}
        async with asgi(server) as client:

            async def first_tokens() -> float:
                await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(4)))
                told = (await client.get("/metrics")).text
                return float(re.findall(rf"^{name} (\S+)$", told, re.MULTILINE)[0])

            before = await first_tokens()  # with the time of loading
            began = time.perf_counter()
            waited = await first_tokens() - before
            # of four in turn the last three wait for one, two and three of them
            assert waited > time.perf_counter() - began
        await host.close()

    asyncio.run(check())
