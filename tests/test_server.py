"""`homespec serve` as its clients see it: the official client against a running process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from homespec.chat.conversation import Conversation
from homespec.chat.remote_engine import RemoteEngine
from homespec.chat.settings import Settings
from homespec.decoding.sampling import SamplingParams
from homespec.engine import Engine, LoadParams
from homespec.errors import ContextFullError

from tests.server_process import ServerProcess, serving, until
from tests.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

QUESTION = [{"role": "user", "content": "Tell me of the sea"}]
TOOL_TEMPLATE = "{% if tools %}{{ '<tool_call>' + (tools | tojson) }}{% endif %}" + CHAT_TEMPLATE
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


# Rules that begin with the next one in two ways.
TWICE = "".join(f"a{i} ::= a{i + 1} | a{i + 1}\n" for i in range(60)) + 'a60 ::= "x"\nroot ::= a0'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with a template that has a place for tools."""
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    return write_tiny_gguf(path, chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with a context that takes a while to fill."""
    path = tmp_path_factory.mktemp("served") / "slow.gguf"
    return write_tiny_gguf(path, context_length=65536)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    # Whatever runs beside it, the width of a pass must not change the bits that are compared.
    with serving(model, "-np", "4", "-c", "512", "--temp", "0", "--strict-exact") as running:
        yield running


@pytest.fixture(scope="module")
def slow_server(slow: Path) -> Iterator[ServerProcess]:
    """Two at once, and one that may wait."""
    with serving(slow, "-np", "2", "--queue", "1", "-c", "32768", "--temp", "0") as running:
        yield running


def endless(server: ServerProcess, text: str = "Go on") -> openai.Stream:
    return server.client().chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": text}],
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_the_model_is_listed(server: ServerProcess) -> None:
    [listed] = server.client().models.list().data
    assert listed.id == "tiny"
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")


def test_a_chat_is_what_the_engine_says(server: ServerProcess, model: Path) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=20, extra_body={"ignore_eos": True}
    )
    with Engine(model, params=LoadParams(n_ctx=512, threads=1, strict_exact=True)) as engine:
        expected = engine.generate(
            QUESTION, sampling=SamplingParams(temperature=0), max_tokens=20, ignore_eos=True
        )
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == expected.stats.num_prompt_tokens
    assert answer.usage.total_tokens == 20 + expected.stats.num_prompt_tokens
    timings = answer.model_extra["timings"]
    assert timings["predicted_n"] == 20
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]


def test_a_stream_is_the_whole_answer_in_pieces(server: ServerProcess) -> None:
    client, asked = server.client(), {"model": "tiny", "messages": QUESTION, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    events = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert events[0].choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in events[:-1]]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(map(bool, pieces)) > 1
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({event.id for event in events}) == 1


def test_without_stream_options_the_last_event_tells_usage(server: ServerProcess) -> None:
    body = {"messages": QUESTION, "max_tokens": 5, "stream": True}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] <= 5


def test_completions_of_text_tokens_and_lists(server: ServerProcess) -> None:
    client = server.client()

    def texts(prompt: object) -> list[str]:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        assert [choice.index for choice in made.choices] == list(range(len(made.choices)))
        return [choice.text for choice in made.choices]

    one, other = texts("once upon"), texts("a time")
    assert texts(["once upon", "a time"]) == one + other
    assert len(texts([1, 2, 3])) == 1
    streamed = client.completions.create(
        model="tiny", prompt="once upon", max_tokens=8, stream=True
    )
    assert "".join(event.choices[0].text for event in streamed) == one[0]


def test_a_seed_repeats_and_choices_differ(server: ServerProcess) -> None:
    def ask(**more: object) -> list[str]:
        made = server.client().chat.completions.create(
            model="tiny", messages=QUESTION, temperature=2, max_tokens=16, seed=7, **more
        )
        assert made.usage.prompt_tokens == prompt_tokens
        return [choice.message.content for choice in made.choices]

    counted = server.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)
    prompt_tokens = counted.usage.prompt_tokens
    assert len(set(ask(n=3))) == 3
    assert ask() == ask()


def test_stop_and_max_completion_tokens(server: ServerProcess) -> None:
    client = server.client()
    full = client.completions.create(model="tiny", prompt="sea", max_tokens=12).choices[0]
    stop = full.text[3:5]
    cut = client.completions.create(model="tiny", prompt="sea", max_tokens=12, stop=[stop])
    assert cut.choices[0].text == full.text[: full.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model="tiny", messages=QUESTION, max_completion_tokens=3)
    assert short.usage.completion_tokens == 3


def test_a_prompt_too_long_is_refused_with_both_numbers(server: ServerProcess) -> None:
    prompt = list(range(1, 200)) * 3
    with pytest.raises(openai.BadRequestError, match=r"597 tokens.*holds 512") as caught:
        server.client().completions.create(model="tiny", prompt=prompt)
    assert caught.value.code == "context_length_exceeded"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="holds 512"):
            server.client().chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "abc " * 900}], stream=stream
            )


def test_answers_by_schema_are_json(server: ServerProcess) -> None:
    client = server.client()
    named = {"name": "opinion", "schema": SCHEMA, "strict": True}
    made = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": named},
    )
    found = json.loads(made.choices[0].message.content)
    assert found.keys() == {"colour", "sure"}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny", messages=QUESTION, response_format={"type": "xml"}
        )


@pytest.mark.parametrize(
    "extra",
    [
        {"grammar": "root ::= " + " ".join(['"a"{1,1000}'] * 9)},
        {"grammar": "root ::= (((" + '"a"{1,900}' + "){1,900}){1,900}){1,900}"},
        {"grammar": "root ::= root"},
        {"grammar": "root ::= ("},
        {"grammar": "root ::= " + "|".join(['"a"'] * 9000)},
        {"json_schema": {"type": "array", "items": {"type": "null"}, "minItems": 10**9}},
        {"json_schema": {"type": "string", "minLength": 2000, "maxLength": 4000}},
        {"json_schema": {"type": "string", "pattern": "^a{2000000000}$"}},
        {"json_schema": {"type": "string", "pattern": "^[{]([^}]{,1_0000}){1,9000000}$"}},
        {"grammar": "root ::= " + "(" * 200_000},
        {"grammar": TWICE},
        {"json_schema": {"$ref": "http://127.0.0.1/schema.json"}},
        {"json_schema": {"enum": ["x" * 100] * 1000}},
    ],
    ids=str,
)
def test_grammars_that_explode_are_refused(server: ServerProcess, extra: dict[str, object]) -> None:
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError):
        server.client().chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=5, extra_body=extra
        )
    assert time.monotonic() - began < 5


def test_a_tool_that_must_be_called_is_called(server: ServerProcess) -> None:
    client, forced = server.client(), {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER]}
    for choice in ("required", forced):
        made = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert made.finish_reason == "tool_calls"
        assert made.message.content is None
        [call] = made.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert arguments["city"] in ("Oslo", "Rome")
    events = list(client.chat.completions.create(**asked, tool_choice="required", stream=True))
    [streamed] = [e.choices[0].delta.tool_calls[0] for e in events if e.choices[0].delta.tool_calls]
    assert json.loads(streamed.function.arguments) == arguments
    assert events[-1].choices[0].finish_reason == "tool_calls"
    answered = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Rain"},
    ]
    again = client.chat.completions.create(
        model="tiny", messages=answered, tools=[WEATHER], max_tokens=4
    )
    assert again.choices[0].finish_reason in ("length", "stop")


def test_functions_are_tools_in_an_older_form(server: ServerProcess) -> None:
    asked = {
        "messages": QUESTION,
        "functions": [WEATHER["function"]],
        "function_call": {"name": "weather"},
        "temperature": 0,
    }
    [choice] = server.post("/v1/chat/completions", json=asked).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    called = choice["message"]["function_call"]
    assert called["name"] == "weather"
    assert json.loads(called["arguments"])["city"] in ("Oslo", "Rome")
    lines = server.post("/v1/chat/completions", json={**asked, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [called]
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"
    answered = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "weather", "content": "Rain"},
    ]
    again = {**asked, "messages": answered, "function_call": "none", "max_tokens": 4}
    assert server.post("/v1/chat/completions", json=again).status_code == 200
    prompt = server.post("/apply-template", json={"messages": answered}).json()["prompt"]
    assert "<|im_start|>tool\nRain" in prompt
    for wrong in ({"tools": [WEATHER]}, {"functions": 3}, {"function_call": {"name": "other"}}):
        refused = server.post("/v1/chat/completions", json={**asked, **wrong})
        assert refused.status_code == 400


def test_a_tool_that_must_be_called_may_refer_to_its_own_parts(server: ServerProcess) -> None:
    schema = {
        "$defs": {"City": {"enum": ["Oslo"]}},
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "map", "parameters": schema}}
    other = {"type": "function", "function": {"name": "clock"}}
    forced = {"type": "function", "function": {"name": "map"}}
    for tools in ([tool], [other, tool]):
        made = server.client().chat.completions.create(
            model="tiny", messages=QUESTION, tools=tools, tool_choice=forced
        )
        [call] = made.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_log_probabilities(server: ServerProcess) -> None:
    client = server.client()
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 6, "logprobs": True}
    made = client.chat.completions.create(**asked, top_logprobs=3)
    told = made.choices[0].logprobs.content
    assert len(told) == made.usage.completion_tokens == 6
    for one in told:
        assert [best.logprob for best in one.top_logprobs] == sorted(
            (best.logprob for best in one.top_logprobs), reverse=True
        )
        assert one.logprob == one.top_logprobs[0].logprob <= 0  # greedy
    text = b"".join(bytes(one.bytes) for one in told).decode("utf-8", "replace")
    assert text == made.choices[0].message.content
    streamed = [
        one
        for event in client.chat.completions.create(**asked, stream=True)
        for one in (event.choices[0].logprobs.content if event.choices[0].logprobs else [])
    ]
    assert [one.token for one in streamed] == [one.token for one in told]
    expected = pytest.approx([one.logprob for one in told], abs=1e-4)
    assert [one.logprob for one in streamed] == expected
    plain = client.completions.create(model="tiny", prompt="sea", max_tokens=4, logprobs=2)
    assert len(plain.choices[0].logprobs.token_logprobs) == 4
    assert plain.choices[0].logprobs.text_offset[0] == 0


def test_many_clients_get_their_own_answers(server: ServerProcess) -> None:
    client = server.client()

    def ask(number: int) -> str:
        made = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{number} " * (number + 1)}],
            max_tokens=24,
            extra_body={"ignore_eos": True},
        )
        return made.choices[0].message.content

    alone = [ask(number) for number in range(16)]
    assert len(set(alone)) > 8
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_requests_that_cannot_be_meant(server: ServerProcess) -> None:
    chat = "/v1/chat/completions"
    deep = "[" * 5000 + "]" * 5000
    for body, status in (
        ("{", 400),
        ("[]", 400),
        ('{"messages": NaN}', 400),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
        (f'{{"messages": {deep}}}', 400),
        ('{"messages": [], "max_tokens": 1}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "unknown": 1}', 400),
        (json.dumps({"messages": [{"role": "user", "content": "x"}] * 2000}), 400),
        (json.dumps({"messages": QUESTION, "n": 99}), 400),
        (json.dumps({"messages": QUESTION, "logit_bias": {"99999": 1}}), 400),
        (json.dumps({"messages": QUESTION, "seed": 10**30}), 400),
        (json.dumps({"messages": QUESTION, "temperature": 10**400}), 400),
    ):
        answer = server.post(chat, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, body[:80]) == (status, body[:80])
        assert answer.json()["error"]["message"]
    assert (
        server.post(chat, content="{}", headers={"content-type": "text/plain"}).status_code == 415
    )
    assert server.post(chat, json={"prompt": "x" * (9 << 20)}).status_code == 413
    assert server.get(chat).status_code == 405
    assert server.get("/v1/nothing").status_code == 404
    assert server.get("/health", headers={"host": "evil.example"}).status_code == 403
    options = httpx.options(f"{server.url}{chat}", headers={"origin": "http://evil.example"})
    assert not any("allow-origin" in name for name in options.headers)


def test_health_props_and_metrics(server: ServerProcess) -> None:
    assert server.get("/health").json()["status"] == "ok"
    props = server.get("/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 512
    before = server.metric("tokens_generated_total")
    server.client().completions.create(model="tiny", prompt="sea", max_tokens=5)
    assert 1 <= server.metric("tokens_generated_total") - before <= 5
    assert server.metric("requests_running") == 0
    assert server.metric("memory_resident_bytes") > 1e6
    for name in ("verify_seconds_total", "draft_seconds_total", "draft_tokens_total", "passes"):
        assert server.metric(name) >= 0


def test_what_is_said_is_not_logged(server: ServerProcess, model: Path) -> None:
    def ask(asked: ServerProcess) -> None:
        asked.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "my secret"}], max_tokens=3
        )
        asked.post("/v1/chat/completions", json={"messages": "my secret"})

    ask(server)
    server.wait_for("/v1/chat/completions 200")
    assert "secret" not in server.log
    with serving(model, "-np", "1", "-c", "256", "--log-prompts") as telling:
        ask(telling)
        telling.wait_for("my secret")


def test_a_client_that_leaves_is_dropped(slow_server: ServerProcess) -> None:
    stream = endless(slow_server)
    for _ in range(5):
        next(stream)
    assert slow_server.metric("requests_running") == 1
    before = slow_server.metric("tokens_generated_total")
    stream.close()
    until(lambda: slow_server.metric("requests_running") == 0, 5)
    assert slow_server.metric("tokens_generated_total") > before  # they took time, too
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{slow_server.url}/v1/completions",
            json={"prompt": "Go", "ignore_eos": True},
            timeout=1,
            trust_env=False,
        )
    until(lambda: slow_server.metric("requests_running") == 0, 5)
    with pytest.raises(openai.APITimeoutError):
        slow_server.client().with_options(timeout=0.5).completions.create(
            model="slow", prompt="Go", extra_body={"ignore_eos": True}
        )
    until(lambda: slow_server.metric("requests_running") == 0, 5)


def test_a_full_queue_says_when_to_come_again(slow_server: ServerProcess) -> None:
    streams = [endless(slow_server, f"Go {i}") for i in range(2)]
    waiting = threading.Thread(target=lambda: list(endless_or_none(slow_server)), daemon=True)
    waiting.start()
    until(lambda: slow_server.metric("requests_waiting") == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        endless(slow_server)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    until(lambda: slow_server.metric("requests_waiting") == 0)


def endless_or_none(server: ServerProcess) -> Iterator[object]:
    """A few events, then away."""
    stream = endless(server, "I wait")
    for _ in range(3):
        yield next(stream)
    stream.close()


def test_a_time_limit_ends_an_answer(slow: Path) -> None:
    with serving(slow, "-np", "1", "-c", "32768", "--time-limit", "1") as server:
        began = time.monotonic()
        made = server.client().completions.create(
            model="slow", prompt="Go", extra_body={"ignore_eos": True}
        )
        assert 0.9 < time.monotonic() - began < 10
        assert made.choices[0].finish_reason == "length"
        assert made.usage.completion_tokens > 10


def test_keys(model: Path, tmp_path: Path) -> None:
    hashes = tmp_path / "keys"
    hashed = "1f4b2fd5f3d6a9b8" * 4
    from hashlib import sha256

    hashes.write_text(f"# keys\n{sha256(b'kept-elsewhere').hexdigest()}  alice\n{hashed}\n")
    flags = ("-np", "1", "-c", "256", "--api-key", "in-the-open", "--api-key-file", str(hashes))
    with serving(model, *flags) as server:
        for key in ("in-the-open", "kept-elsewhere"):
            assert server.client(key).models.list().data
        for path in ("/v1/models", "/metrics", "/props", "/openapi.json"):
            assert server.get(path).status_code == 401
        for key in ("wrong-key", hashed):
            with pytest.raises(openai.AuthenticationError):
                server.client(key).chat.completions.create(model="tiny", messages=QUESTION)
        assert server.get("/health").status_code == 200


def test_a_network_needs_a_key(model: Path) -> None:
    command = [sys.executable, "-m", "homespec", "serve", "-m", str(model), "--port", "0"]
    for flags, hint in (
        (["--host", "0.0.0.0"], "no API key"),
        (["--host", "::"], "no API key"),
        (["--api-key", "short"], "at least"),
        (["--api-key-file", "/nonexistent"], "cannot be read"),
    ):
        done = subprocess.run(
            [*command, *flags], check=False, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, hint in done.stderr) == (2, True), done.stderr


def test_a_port_in_use_and_a_bad_model(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "homespec", "serve"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*command, "-m", str(model), "--port", port],
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 4, done.stderr
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:1000])
    done = subprocess.run(
        [*command, "-m", str(broken), "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_answers_end(slow: Path) -> None:
    server = ServerProcess(slow, "-np", "2", "-c", "32768")
    stream = server.client().completions.create(
        model="slow", prompt="Go", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    events = list(stream)
    assert events[-1].choices[0].finish_reason == "length"
    assert events[-1].model_extra["timings"]["predicted_n"] == 300
    assert server.finish() == 0, server.log
    assert "Traceback" not in server.log


def test_sigterm_waits_no_longer_than_told(slow: Path) -> None:
    server = ServerProcess(slow, "-np", "1", "-c", "32768", "--shutdown-time", "1")
    stream = endless(server)
    next(stream)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.finish() == 0, server.log
    assert time.monotonic() - began < 15


def test_a_killed_server_does_not_hinder_the_next(slow: Path) -> None:
    server = ServerProcess(slow, "-np", "1", "-c", "1024")
    stream = endless(server)
    next(stream)
    server.process.kill()
    server.finish()
    with serving(slow, "-np", "1", "-c", "1024", "--port", str(server.port)) as again:
        assert again.client().completions.create(model="slow", prompt="Go", max_tokens=2)


def test_an_idle_model_is_let_go_and_loaded_again(model: Path) -> None:
    with serving(model, "-np", "1", "-c", "256", "--keep-alive", "0.5") as server:
        client = server.client()
        asked = {"model": "tiny", "prompt": "sea", "max_tokens": 5, "temperature": 0}
        before = client.completions.create(**asked)
        until(lambda: server.get("/health").json()["model"] == "let go")
        assert server.metric("model_loaded") == 0
        assert client.models.list().data
        assert client.completions.create(**asked).choices[0].text == before.choices[0].text
        until(lambda: server.get("/health").json()["model"] == "let go")
        with RemoteEngine(f"{server.url}/v1") as engine:
            with pytest.raises(ContextFullError, match="holds 256"):
                Conversation(engine).ask("word " * 300)
            assert engine.n_ctx == 256


def test_a_chat_that_waits_for_its_answer_can_be_stopped(slow_server: ServerProcess) -> None:
    streams = [endless(slow_server, f"Go {i}") for i in range(2)]
    with RemoteEngine(f"{slow_server.url}/v1") as engine, ThreadPoolExecutor(1) as pool:
        answering = engine.answer(QUESTION, Settings())
        heard = pool.submit(lambda: list(answering))
        until(lambda: slow_server.metric("requests_waiting") == 1)
        engine.abort()
        with pytest.raises(KeyboardInterrupt):
            heard.result(10)
        until(lambda: slow_server.metric("requests_waiting") == 0, 5)
    for stream in streams:
        stream.close()


def test_a_chat_in_the_terminal_talks_to_it(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "homespec", "chat", "--url", f"{server.url}/v1"]
    flags = ["--temp", "0", "-n", "9", "-p", "Tell me of the sea"]
    done = subprocess.run(
        [*command, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    made = server.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=9, temperature=0
    )
    assert made.choices[0].message.content.strip() in done.stdout
    away = subprocess.run(
        [*command[:-1], "http://127.0.0.1:9/v1", "-p", "x"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (away.returncode, "Traceback" in away.stderr) == (4, False), away.stderr


def test_the_prompt_of_messages_and_its_tokens(server: ServerProcess) -> None:
    prompt = server.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
    assert "Tell me of the sea" in prompt
    tokens = server.post("/tokenize", json={"content": prompt, "add_special": True}).json()
    made = server.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)
    assert len(tokens["tokens"]) == made.usage.prompt_tokens
    assert server.post("/tokenize", json={"content": 3}).status_code == 400
    spelt = server.post("/tokenize", json={"content": "<|end|>", "parse_special": False}).json()
    special = server.post("/tokenize", json={"content": "<|end|>"}).json()
    assert len(spelt["tokens"]) > len(special["tokens"]) == 1


def test_the_prompt_of_messages_is_read_as_a_chat_is(server: ServerProcess) -> None:
    asked = {"messages": QUESTION, "tools": [WEATHER]}
    assert "Oslo" in server.post("/apply-template", json=asked).json()["prompt"]
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 10**9}
    refused = server.post("/apply-template", json={"messages": QUESTION, "json_schema": schema})
    assert refused.json()["error"]["code"] == "grammar_too_large"


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("grammar", ["root ::= [^]", 'root ::= "a"'])
def test_a_grammar_that_allows_nothing_harms_nobody_else(
    server: ServerProcess, grammar: str, temperature: float
) -> None:
    client, extra = server.client(), {"ignore_eos": True}
    beside = client.completions.create(
        model="tiny", prompt="sea", max_tokens=400, stream=True, extra_body=extra
    )
    next(beside)
    # Once the grammar has ended only an end token is left, and that is banned.
    body = {"prompt": "x", "max_tokens": 9, "grammar": grammar, "temperature": temperature}
    answer = server.post("/v1/completions", json={**body, **extra})
    assert answer.status_code == 400
    assert "allows no token" in answer.json()["error"]["message"]
    assert list(beside)[-1].choices[0].finish_reason == "length"


def test_the_starter_says_in_company_what_it_says_alone(starter: Path) -> None:
    questions = ["Name three birds.", "Why is the sky blue?", "What is 7 times 8?", "Sing!"]
    with serving(starter, "-np", "4", "-c", "512", "--temp", "0") as server:
        client = server.client()

        def ask(question: str) -> list[tuple[str, float]]:
            """(token, by how much it beats the next)"""
            made = client.chat.completions.create(
                model="starter",
                messages=[{"role": "user", "content": question}],
                max_tokens=24,
                logprobs=True,
                top_logprobs=2,
            )
            told = made.choices[0].logprobs.content
            tops = [one.top_logprobs for one in told]
            return [
                (one.token, top[0].logprob - top[1].logprob)
                for one, top in zip(told, tops, strict=True)
            ]

        alone = [ask(question) for question in questions]
        with ThreadPoolExecutor(4) as pool:
            company = list(pool.map(ask, questions))
    assert len({tuple(token for token, _ in answer) for answer in alone}) == 4
    for one, other in zip(alone, company, strict=True):
        parted = [gap for (a, gap), (b, _) in zip(one, other, strict=False) if a != b]
        assert not parted or parted[0] < 0.5  # a near-tie at most
