"""Rows in, rows out: forms, resume, repair, locks, interrupts, and the scheduler's own streams."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from homespec.api import CHAT, COMPLETION, Defaults, read_call
from homespec.batch.journal import Journal
from homespec.batch.local import LocalRunner
from homespec.batch.rows import BadRow, Row, read_row
from homespec.batch.run import BatchRun, Summary
from homespec.batch.source import Source, survey
from homespec.chat import transcript
from homespec.chat.settings import Settings
from homespec.decoding.sampling import SamplingParams
from homespec.errors import DiskError, UsageError
from homespec.generation import GenerateParams
from homespec.loading import LoadParams
from homespec.scheduling.engine import ParallelEngine

HOMESPEC = [sys.executable, "-m", "homespec"]
TIMEOUT = 120
LOAD = LoadParams(n_ctx=128, threads=1, strict_exact=True, tuned=False)
DEFAULTS = Defaults(SamplingParams(temperature=1.0), GenerateParams(max_tokens=6))


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[ParallelEngine]:
    with ParallelEngine(tiny, LOAD, parallel=4) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"row {i}", "prompt": f"the number {i}", **more} for i in range(count)]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by name; none twice, every line whole."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def content(row: dict[str, Any]) -> str:
    choice = row["response"]["body"]["choices"][0]
    return str(choice.get("text", choice.get("message", {}).get("content")))


def run(
    engine: ParallelEngine,
    source: Path,
    output: Path,
    *,
    errors: Path | None = None,
    defaults: Defaults = DEFAULTS,
    **options: Any,
) -> Summary:
    rows, answers = Source(source), Journal(output)
    failures = Journal(errors) if errors else None
    try:
        return BatchRun(
            rows,
            LocalRunner(engine, defaults),
            defaults,
            answers,
            failures,
            num_rows=survey(rows),
            **options,
        ).run()
    finally:
        rows.close()
        answers.close()
        if failures:
            failures.close()


def test_every_form_of_a_row_is_answered(engine: ParallelEngine, tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "in",
        [
            {
                "custom_id": "openai",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": "any",
                    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                    "max_tokens": 2,
                },
            },
            {"custom_id": "raw", "url": COMPLETION, "body": {"prompt": "ab", "max_tokens": 3}},
            {"custom_id": "ids", "url": COMPLETION, "body": {"prompt": [5, 6], "max_tokens": 3}},
            {"prompt": "short", "temperature": 0},
            {"messages": [{"role": "user", "content": "x"}], "stop": ["e"], "seed": 4},
            "plain text, as it stands",
            "",
        ],
    )
    summary = run(engine, source, tmp_path / "out")
    rows = read(tmp_path / "out")
    assert set(rows) == {"openai", "raw", "ids", "line-4", "line-5", "line-6"}
    assert (summary.num_done, summary.num_failed, summary.num_rows) == (6, 0, 6)
    body = rows["openai"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "any"
    assert 1 <= body["usage"]["completion_tokens"] <= 2
    assert body["usage"]["prompt_tokens"] == len(engine.encode("a"))
    assert body["timings"]["predicted_n"] == body["usage"]["completion_tokens"]
    assert rows["raw"]["response"]["body"]["object"] == "text_completion"
    assert rows["ids"]["response"]["body"]["usage"]["prompt_tokens"] == 2
    assert "e" not in content(rows["line-5"])
    assert all(row["error"] is None for row in rows.values())


def test_a_row_that_fails_says_why_and_the_others_go_on(
    engine: ParallelEngine, tmp_path: Path
) -> None:
    source = write_rows(
        tmp_path / "in",
        [
            '{"custom_id": "torn", "prompt": ',
            {"custom_id": "long", "prompt": "word " * 200},
            {"custom_id": "grammar", "prompt": "x", "grammar": "no grammar"},
            {"custom_id": "key", "prompt": "x", "temprature": 1},
            {"custom_id": "two", "prompt": "x", "n": 2},
            {"custom_id": "range", "prompt": "x", "top_p": 7},
            {"custom_id": "type", "prompt": "x", "max_tokens": "many"},
            {"custom_id": "url", "url": "/v1/embeddings", "body": {"input": "x"}},
            {"custom_id": "schema", "prompt": "x", "json_schema": []},
            {"custom_id": "empty"},
            {"custom_id": 3, "prompt": "x"},
            "[1, 2]",
            {"custom_id": "good", "prompt": "x"},
        ],
    )
    summary = run(engine, source, tmp_path / "out", errors=tmp_path / "errors")
    good, bad = read(tmp_path / "out"), read(tmp_path / "errors")
    assert set(good) == {"good", "line-12"}
    assert summary.num_failed == len(bad) == 11
    messages = {name: row["error"]["message"] for name, row in bad.items()}
    assert "no JSON" in messages["line-1"]
    assert "context" in messages["long"]
    assert bad["long"]["error"]["code"] == "context_too_small"
    assert "grammar" in messages["grammar"]
    assert "temprature" in messages["key"]
    assert "n is not supported" in messages["two"]
    assert "top_p" in messages["range"]
    assert "max_tokens" in messages["type"]
    assert "url" in messages["url"]
    assert "schema" in messages["schema"]
    assert "prompt" in messages["empty"]
    assert "custom_id" in messages["line-11"]


HALF = "cut emoji \ud83d"
HUGE = 10**400


def test_a_row_that_nobody_thought_of_is_an_error_row(
    engine: ParallelEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"custom_id": "half", "prompt": HALF},
        {"custom_id": "grammar", "prompt": "x", "grammar": f'root ::= "{HALF}"'},
        {"custom_id": "bias", "prompt": "x", "logit_bias": {"5": HUGE}},
        {"custom_id": "warm", "prompt": "x", "temperature": HUGE},
        {"custom_id": "stop", "prompt": "x", "stop": HALF},
        {"custom_id": HALF, "prompt": "x", "model": HALF},
    ]
    source, out = write_rows(tmp_path / "in", rows), tmp_path / "out"
    summary = run(engine, source, out)
    assert (summary.num_done, summary.num_failed) == (2, 4)
    assert run(engine, source, out).num_skipped == 6
    found = read(out)
    messages = {name: row["error"]["message"] for name, row in found.items() if row["error"]}
    assert "half of a character" in messages["half"]
    assert "half of a character" in messages["grammar"]
    assert "logit_bias" in messages["bias"]
    assert "temperature is too large" in messages["warm"]
    with pytest.raises(UsageError, match="half of a character"):
        engine.tokenizer.encode(HALF)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("homespec.batch.local.request_of", broken)
    assert run(engine, write_rows(source, numbered(2)), tmp_path / "other").num_failed == 2
    assert "ZeroDivisionError: by nought" in read(tmp_path / "other")["row 1"]["error"]["message"]


def test_rows_of_one_body_have_ids_of_their_own(engine: ParallelEngine, tmp_path: Path) -> None:
    rows = [{"custom_id": name, "prompt": "the same"} for name in "abc"]
    run(engine, write_rows(tmp_path / "in", rows), tmp_path / "out")
    found = read(tmp_path / "out").values()
    assert len({row["id"] for row in found}) == 3
    assert len({row["response"]["request_id"] for row in found}) == 3


def test_what_was_done_before_is_known_from_the_first_row_on(
    engine: ParallelEngine, tmp_path: Path
) -> None:
    rows = [{"custom_id": "long", "prompt": "word " * 200}, *numbered(9)]
    source, out = write_rows(tmp_path / "in", rows), tmp_path / "out"
    run(engine, source, out)
    lines = [line for line in out.read_bytes().splitlines(True) if b'"row 1"' not in line]
    out.write_bytes(b"".join(lines))
    told: list[tuple[int, int]] = []
    input_, answers = Source(source), Journal(out)
    batch = BatchRun(input_, LocalRunner(engine, DEFAULTS), DEFAULTS, answers, num_rows=10)
    summary = batch.run(lambda so_far: told.append((so_far.num_skipped, so_far.num_left)))
    input_.close()
    answers.close()
    assert told[0] == (9, 1)
    assert {skipped for skipped, _ in told} == {9}
    assert (summary.num_failed, summary.num_failed_before, summary.num_left) == (0, 1, 0)


@pytest.mark.parametrize("apart", [True, False])
def test_the_error_of_a_line_that_was_repaired_goes(
    engine: ParallelEngine, tmp_path: Path, apart: bool
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    errors = tmp_path / "errors" if apart else None
    write_rows(source, ['{"custom_id": "torn", "prompt": ', *numbered(2)])
    assert run(engine, source, out, errors=errors).num_failed == 1
    assert "line-1" in read(errors or out)
    write_rows(source, [{"custom_id": "torn", "prompt": "whole"}, *numbered(2)])
    assert run(engine, source, out, errors=errors).num_done == 1
    assert set(read(out)) == {"torn", "row 0", "row 1"}
    assert not apart or read(tmp_path / "errors") == {}
    # A row that says it is called so keeps its error.
    write_rows(source, [{"custom_id": "a", "prompt": "x"}, {"custom_id": "line-1", "n": 2}])
    for _ in range(2):
        run(engine, source, out, errors=errors)
        assert read(errors or out)["line-1"]["error"] is not None


def test_a_rerun_does_what_is_missing_and_what_changed(
    engine: ParallelEngine, tmp_path: Path
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write_rows(source, numbered(6))
    assert run(engine, source, out).num_done == 6
    before = read(out)
    assert (again := run(engine, source, out)).num_skipped == 6
    assert again.num_done == 0
    assert read(out) == before
    rows = numbered(8)
    rows[2]["prompt"] = "another one"
    write_rows(source, rows)
    summary = run(engine, source, out)
    assert (summary.num_done, summary.num_skipped) == (3, 5)
    after = read(out)
    assert len(after) == 8
    assert {name for name in before if before[name] != after[name]} == {"row 2"}
    warmer = Defaults(SamplingParams(temperature=1.0, seed=9), DEFAULTS.params)
    assert run(engine, source, out, defaults=warmer).num_done == 8
    assert len(read(out)) == 8


@pytest.mark.parametrize("apart", [True, False])
def test_errors_are_retried_when_asked(engine: ParallelEngine, tmp_path: Path, apart: bool) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    errors = tmp_path / "errors" if apart else None
    write_rows(source, [{"custom_id": "long", "prompt": "word " * 45}, *numbered(2)])
    assert run(engine, source, out, errors=errors).num_failed == 1
    assert run(engine, source, out, errors=errors).num_skipped == 3
    assert run(engine, source, out, errors=errors, retry_errors=True).num_failed == 1
    assert len(read(errors or out)) == (1 if apart else 3)
    with ParallelEngine(engine.model.path, LoadParams(n_ctx=512, threads=1), parallel=2) as roomy:
        summary = run(roomy, source, out, errors=errors, retry_errors=True)
    assert (summary.num_done, summary.num_skipped, summary.num_failed) == (1, 2, 0)
    assert read(out)["long"]["error"] is None
    if errors:
        assert read(errors) == {}


def test_a_rows_text_follows_from_seed_and_name_alone(
    engine: ParallelEngine, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in", numbered(9))
    run(engine, source, tmp_path / "four")
    with ParallelEngine(engine.model.path, LOAD, parallel=1) as single:
        run(single, write_rows(source, numbered(9)[::-1]), tmp_path / "one")
    four, one = read(tmp_path / "four"), read(tmp_path / "one")
    assert {name: content(row) for name, row in four.items()} == {
        name: content(row) for name, row in one.items()
    }
    seeds = {row["homespec"]["seed"] for row in four.values()}
    assert len(seeds) == 9


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_torn_last_line_is_repaired(engine: ParallelEngine, tmp_path: Path, cut: int) -> None:
    source, out = write_rows(tmp_path / "in", numbered(4)), tmp_path / "out"
    run(engine, source, out)
    whole = read(out)
    data = out.read_bytes()
    last = len(data.splitlines()[-1]) + 1
    out.write_bytes(data[: len(data) - min(cut, last - 1)])
    summary = run(engine, source, out)
    assert summary.num_skipped == (4 if cut == 1 else 3)
    found = read(out)
    assert {name: content(row) for name, row in found.items()} == {
        name: content(row) for name, row in whole.items()
    }


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path) -> None:
    for text in ("a letter\n", "a letter without end", '{"custom_id": 1}\n'):
        path = tmp_path / "letter"
        path.write_text(text)
        with pytest.raises(UsageError, match="something else"):
            Journal(path)
        assert path.read_text() == text


def test_two_runs_on_one_output_exclude_each_other(tmp_path: Path) -> None:
    first = Journal(tmp_path / "out")
    with pytest.raises(UsageError, match="Another run"):
        Journal(tmp_path / "out")
    first.close()
    Journal(tmp_path / "out").close()


def test_a_file_that_cannot_be_written_is_told_with_a_hint_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "out.jsonl"
    with pytest.raises(DiskError) as told:
        Journal(path)
    with pytest.raises(DiskError) as chat:
        transcript.write(path, transcript.Transcript("m", None, [], Settings()))
    for hint in (told.value.hint, chat.value.hint):
        assert hint is not None
        assert "name another file" in hint
        assert "HF_HOME" not in hint


def test_a_pipe_that_has_a_name_is_read_like_one_without(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("one\ntwo\n",))
    writer.start()
    source = Source(path, tmp_path)
    writer.join()
    assert survey(source) == 2
    assert [line.text for line in source.lines()] == [b"one\n", b"two\n"]
    source.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_used_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    rows = [*numbered(5), "text", {"custom_id": "row 1", "prompt": "x"}]
    source = Source(write_rows(tmp_path / "in", rows))
    with pytest.raises(UsageError, match=r"'row 1' stands in lines 2 and 7"):
        survey(source)
    source.close()
    source = Source(write_rows(tmp_path / "in", ["text", {"custom_id": "line-1", "prompt": "x"}]))
    with pytest.raises(UsageError, match="lines 1 and 2"):
        survey(source)
    source.close()


def test_gzip_byte_marks_and_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + b'{"prompt": "x"}\r\n\n' + b"tail"))
    source = Source(path)
    lines = list(source.lines())
    assert [(line.number, line.text.strip()) for line in lines] == [
        (1, b'{"prompt": "x"}'),
        (3, b"tail"),
    ]
    source.close()
    path.write_bytes(path.read_bytes()[:-9])
    source = Source(path)
    with pytest.raises(UsageError, match="gzip"):
        survey(source)
    source.close()
    long = read_row(b"x" * (17 << 20), 1)
    assert isinstance(long, BadRow)
    assert "longer" in long.error.message
    latin = read_row(b"\xff\xfe", 1)
    assert isinstance(latin, BadRow)


def test_bodies_are_read_strictly() -> None:
    call = read_call(
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
            "temperature": 0.5,
            "max_completion_tokens": 7,
            "stop": "END",
            "logit_bias": {"5": -100, "6": False},
            "response_format": {"type": "json_object"},
            "stream": False,
            "user": "somebody",
            "top_p": None,
        },
        Defaults(SamplingParams(top_k=3, seed=5), GenerateParams(), "be brief"),
    )
    assert call.sampling.temperature == 0.5
    assert call.sampling.top_k == 3
    assert call.sampling.seed is None
    assert call.sampling.grammar is not None
    assert call.sampling.logit_bias == ((5, -100.0), (6, float("-inf")))
    assert call.params.max_tokens == 7
    assert call.params.stop == ("END",)
    assert call.system == "be brief"
    one = {"messages": [{"role": "user", "content": "x"}]}
    for more in (
        {"stream": True},
        {"logprobs": True},
        {"tools": [{"type": "function"}]},
        {"temperature": True},
        {"seed": 1.5},
        {"stop": [1]},
        {"response_format": {"type": "yaml"}},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"logit_bias": [1]},
    ):
        with pytest.raises(UsageError):
            read_call(CHAT, {**one, **more}, DEFAULTS)


def test_rows_are_keyed_by_what_their_answer_depends_on() -> None:
    row = read_row(b'{"custom_id": "a", "prompt": "x"}', 1)
    assert isinstance(row, Row)
    moved = read_row(b'{"prompt": "x", "custom_id": "b"}', 9)
    assert row.key("s") == moved.key("s")
    assert row.key("s") != row.key("t")
    assert row.key("s") != read_row(b'{"prompt": "y"}', 1).key("s")


def cli(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMESPEC, "batch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        **options,
    )


def test_the_command_from_a_pipe_into_a_pipe(tiny: Path, tmp_path: Path) -> None:
    rows = '{"prompt": "x", "max_tokens": 4}\nplain\n{"custom_id": "bad"}\n'
    done = cli("-i", "-", "-o", "-", "-m", tiny, "-c", "64", "-n", "3", input=rows, cwd=tmp_path)
    assert done.returncode == 1
    found = {row["custom_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"line-1", "line-2", "bad"}
    assert "3 rows: 2 answered, 1 failed" in done.stderr
    same = cli("-i", tmp_path / "f", "-o", tmp_path / "f", "-m", tiny)
    assert same.returncode == 2
    (tmp_path / "f").write_text("x\n")
    same = cli("-i", tmp_path / "f", "-o", tmp_path / "f", "-m", tiny)
    assert same.returncode == 2
    assert "is the input, too" in same.stderr
    assert (tmp_path / "f").read_text() == "x\n"


def test_failures_of_an_earlier_run_are_not_passed_over(tiny: Path, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in", ["x", {"custom_id": "bad"}]), tmp_path / "out"
    options = ("-i", source, "-m", tiny, "-c", "64", "-n", "3")
    assert cli("-o", out, *options).returncode == 1
    again = cli("-o", out, *options)
    assert again.returncode == 1
    assert "1 done before, 1 failed before (--retry-errors tries them again)" in again.stderr
    write_rows(source, ["x", {"custom_id": "bad", "prompt": "good"}])
    assert cli("-o", out, *options).returncode == 0


def test_outputs_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in", ["x"]), tmp_path / "out"
    same = cli("-i", source, "-o", out, "--jsonl-errors", out)
    assert same.returncode == 2
    assert "both name" in same.stderr
    zipped = cli("-i", source, "-o", f"{out}.jsonl.gz")
    assert zipped.returncode == 2
    assert "cannot be gzipped" in zipped.stderr
    assert "out.jsonl," in zipped.stderr
    assert list(tmp_path.iterdir()) == [source]


def start(tiny: Path, source: Path, out: Path) -> subprocess.Popen[str]:
    command = [*HOMESPEC, "batch", "-i", source, "-o", out, "-m", tiny, "-c", "512"]
    command += ["-np", "2", "-t", "1", "--ignore-eos", "-n", "60"]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def grown(process: subprocess.Popen[str], out: Path, size: int) -> bool:
    """Wait until the output has that size; False where the run is over before."""
    began = time.monotonic()
    while not out.exists() or out.stat().st_size < size:
        if process.poll() is not None:
            return False
        assert time.monotonic() - began < TIMEOUT
        time.sleep(0.002)
    return True


def test_killed_again_and_again_every_row_is_there_once(tiny: Path, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in", numbered(120)), tmp_path / "out"
    for _ in range(4):
        size = out.stat().st_size if out.exists() else 0
        process = start(tiny, source, out)
        assert grown(process, out, size + 9000)
        process.kill()
        process.communicate()
    process = start(tiny, source, out)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    assert "done before" in said
    rows = read(out)
    assert set(rows) == {f"row {i}" for i in range(120)}
    assert all(row["error"] is None for row in rows.values())


def test_an_interrupt_ends_it_in_order(tiny: Path, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in", numbered(3000)), tmp_path / "out"
    process = start(tiny, source, out)
    assert grown(process, out, 3000)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "Interrupted. 3000 rows:" in said
    assert "The same command does the rest" in said
    done = len(read(out))
    assert f"{done} answered, {3000 - done} left" in said
    process = start(tiny, source, out)
    assert grown(process, out, out.stat().st_size + 3000)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert len(read(out)) > done
