"""The command line as a user meets it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pexpect
import psutil
import pytest
from homespec.cli.app import COMMANDS, cli

from tests.tiny_gguf import write_tiny_gguf

HOMESPEC = [sys.executable, "-m", "homespec"]


def homespec(*args: object, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMESPEC, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HOMESPEC_THREADS": "1"} | env,
    )


def generate(*args: object, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return homespec("generate", "--temp", 0, "-n", 20, *args, stdin=stdin, **env)


def test_help_is_quick_and_whole() -> None:
    began = time.monotonic()
    done = homespec("--help")
    assert done.returncode == 0
    assert time.monotonic() - began < 5
    for command in ("generate", "doctor"):
        assert command in done.stdout
    flags = homespec("generate", "--help").stdout
    for flag in ("-md", "-ngl", "--spec-draft-n-max", "--draft-max", "--top-k", "-hf", "-ctk"):
        assert flag in flags


def test_the_answer_alone_goes_to_stdout(tiny: Path, tiny_draft: Path) -> None:
    done = generate("-m", tiny, "-md", tiny_draft, "Hello")
    quiet = generate("-m", tiny, "-q", "--spec-type", "none", "Hello")
    assert done.returncode == quiet.returncode == 0
    assert done.stdout == quiet.stdout != ""
    assert quiet.stderr == ""
    for part in ("first token", "tok/s", "acceptance length", "draft", "verify", "peak"):
        assert part in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_json_is_one_object(tiny: Path, tiny_draft: Path) -> None:
    done = generate("-m", tiny, "-md", tiny_draft, "--depth", "fixed", "--json", "Hello")
    [line] = done.stdout.splitlines()
    result = json.loads(line)
    assert {"text", "tokens", "finish_reason", "stats", "seed"} <= result.keys()
    assert len(result["tokens"]) == 20
    assert result["finish_reason"] == "length"
    assert result["stats"]["num_drafted"] > 0


def test_a_prompt_comes_from_three_places(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello")
    answers = {
        generate("-m", tiny, "-q", *how, stdin=stdin).stdout
        for how, stdin in (
            (["Hello"], ""),
            (["-p", "Hello"], ""),
            (["-f", tmp_path / "prompt.txt"], ""),
            ([], "Hello"),
        )
    }
    assert len(answers) == 1


def test_settings_come_from_the_environment(tiny: Path) -> None:
    for name in ("HOMESPEC_MODEL", "LLAMA_ARG_MODEL"):
        done = generate("-q", "Hello", **{name: str(tiny)})
        assert done.returncode == 0
        assert done.stdout == generate("-m", tiny, "-q", "Hello").stdout


def test_every_value_has_a_variable_that_is_read(tiny: Path) -> None:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag:
                assert "HOMESPEC_" in str(option.envvar), f"{name} {option.name}"
    for variable, value in (
        ("HOMESPEC_SPEC_TYPE", "magic"),
        ("HOMESPEC_GENERATE_SPEC_TYPE", "sorcery"),
        ("HOMESPEC_GRAMMAR", "root ::= nowhere"),
    ):
        done = generate("-m", tiny, "-q", "Hello", **{variable: value})
        assert done.returncode == 2
        assert value.split()[-1] in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-m", "missing.gguf", "hi"], 2, "no file missing.gguf"),
        (["-m", "{dir}/text.gguf", "hi"], 3, "not a GGUF"),
        (["-m", "{dir}/head.gguf", "hi"], 3, "head.gguf"),
        (["-m", "{dir}/tail.gguf", "hi"], 3, "tail.gguf"),
        (["-m", "{dir}/arch.gguf", "hi"], 3, "nonsense"),
        (["-m", "{dir}/bert.gguf", "hi"], 3, "bert"),
        (["-m", "{dir}/base.gguf", "hi"], 3, "no chat template"),
        (["-m", "{tiny}", ""], 2, "empty"),
        (["-m", "{tiny}", "-c", "16", "a longer prompt"], 1, "context holds 16"),
        (["-m", "{tiny}", "--temp", "-1", "hi"], 2, "temperature"),
        (["-m", "{tiny}", "--spec-type", "magic", "hi"], 2, "magic"),
        (["-m", "{tiny}", "--spec-draft-n-max", "99", "hi"], 2, "99"),
        (["-m", "{tiny}", "-ngl", "some", "hi"], 2, "some"),
        (["-m", "{tiny}", "-dev", "Warp9", "hi"], 2, "Warp9"),
        (["-m", "{tiny}", "-fa", "off", "-ctv", "q8_0", "hi"], 2, "flash"),
        (["-m", "{tiny}", "--grammar", "root ::= nowhere", "hi"], 2, "nowhere"),
        (["-m", "{tiny}", "-j", "[]", "hi"], 2, "no JSON object"),
        (["-m", "{tiny}", "-l", "7x", "hi"], 2, "logit bias"),
        (["-m", "{tiny}", "-f", "nowhere.txt", "hi"], 2, "nowhere.txt"),
        (["-m", "{tiny}", "-p", "a", "b"], 2, "More than one prompt"),
        (["-m", "{tiny}", "-hf", "a/b", "hi"], 2, "-m and -hf"),
        (["-m", "{tiny}", "--no-such-flag", "hi"], 2, "no-such-flag"),
        (["-m", "{tiny}", "--spec-type", "draft_model", "hi"], 2, "-md"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(
    broken: Path, tiny: Path, args: list[str], code: int, words: str
) -> None:
    filled = [arg.replace("{dir}", str(broken)).replace("{tiny}", str(tiny)) for arg in args]
    done = generate(*filled)
    assert done.returncode == code, done.stderr
    assert words.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture(scope="module")
def broken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    whole = tiny.read_bytes()
    (folder / "text.gguf").write_text("I am no model at all, but long enough to be looked at.")
    (folder / "head.gguf").write_bytes(whole[:600])
    (folder / "tail.gguf").write_bytes(whole[:-5000])
    write_tiny_gguf(folder / "arch.gguf", architecture="nonsense")
    write_tiny_gguf(folder / "bert.gguf", architecture="bert")
    write_tiny_gguf(folder / "base.gguf", chat_template=None)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_came(starter: Path, number: signal.Signals) -> None:
    command = [*HOMESPEC, "generate", "-m", str(starter), "--ignore-eos", "-n", "2000", "Count."]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        first = child.stdout.read(1)
        child.send_signal(number)
        rest, said = child.stdout.read(), child.stderr.read()
    assert first
    assert child.returncode == 130
    assert rest.endswith("\n")
    assert "tok/s" in said
    assert "Traceback" not in said


def test_an_interrupt_with_json_gives_the_object(starter: Path) -> None:
    command = [*HOMESPEC, "generate", "-m", str(starter), "--ignore-eos", "-c", "8192", "--json"]
    with subprocess.Popen([*command, "Count."], stdout=subprocess.PIPE, text=True) as child:
        while psutil.Process(child.pid).cpu_times().user < 6:  # it has loaded, on any machine
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    result = json.loads(output)
    assert result["finish_reason"] == "cancelled"
    assert 0 < len(result["tokens"]) < 8000


def test_a_closed_pipe_is_no_error(tiny: Path) -> None:
    command = " ".join(HOMESPEC)
    done = subprocess.run(
        ["bash", "-c", f"{command} generate -m '{tiny}' -c 512 --ignore-eos Hello | head -c 1"],
        capture_output=True,  # bytes: the first may be a part of a character
        check=False,
    )
    assert len(done.stdout) == 1
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def terminal(*args: object, **env: str) -> str:
    child = pexpect.spawn(
        HOMESPEC[0],
        [*HOMESPEC[1:], *map(str, args)],
        env={**os.environ, "HOMESPEC_THREADS": "1", "TERM": "xterm-256color", **env},
        encoding="utf-8",
        codec_errors="replace",
        timeout=60,
    )
    child.expect(pexpect.EOF)
    return str(child.before)


def test_accepted_tokens_are_tinted_on_a_terminal_alone(tiny: Path, tiny_draft: Path) -> None:
    flags = ["generate", "-m", tiny, "-md", tiny_draft, "--temp", 0, "-n", 30, "--depth", "fixed"]
    flags.append("--show-accepted")
    assert "\x1b[32m" in terminal(*flags, "Hello")
    assert "\x1b[32m" not in terminal(*flags, "Hello", NO_COLOR="1")
    assert "\x1b" not in homespec(*flags, "Hello").stdout


def test_a_models_escape_sequences_never_reach_the_terminal(tiny: Path) -> None:
    """The tiny model writes any byte, control characters included."""
    flags = ["generate", "-m", tiny, "-n", 200, "-c", 512, "-q", "--ignore-eos", "--seed", 1]
    piped = homespec(*flags, "--temp", 5, "--top-k", 0, "--min-p", 0, "--top-p", 1, "Hello").stdout
    shown = terminal(*flags, "--temp", 5, "--top-k", 0, "--min-p", 0, "--top-p", 1, "Hello")
    assert any(ord(c) < 32 and c not in "\n\t" for c in piped)
    assert all(ord(c) >= 32 or c in "\r\n\t" for c in shown)


def test_doctor_speaks_to_people_and_programs(tiny: Path) -> None:
    done = homespec("doctor", "-m", tiny)
    assert done.returncode == 0
    for part in ("llama-cpp-python", "instruction set", "CPU", "Self-test", "idth-invariant"):
        assert part in done.stdout
    facts = json.loads(homespec("doctor", "-m", tiny, "--json").stdout)
    assert facts["problem"] is None
    assert facts["stages"]["decode"]["finite"] is True


def test_a_long_prompt_is_interrupted_at_once(starter: Path, tmp_path: Path) -> None:
    """Not at the end of the batch that is being read."""
    (tmp_path / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 1500)
    command = [*HOMESPEC, "generate", "-m", str(starter), "-c", "20000", "--ignore-eos", "-f"]
    with subprocess.Popen(
        [*command, str(tmp_path / "long.txt")], stderr=subprocess.PIPE, text=True
    ) as child:
        time.sleep(8)
        assert child.poll() is None
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert time.monotonic() - began < 4
    assert child.returncode == 130
    assert "Traceback" not in said
