"""The chat in a real pseudo-terminal, and through pipes."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest

from tests.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

ROOT = Path(__file__).parent.parent
Start = Callable[..., "Terminal"]


class Terminal:
    """A program in a pseudo-terminal, and the screen it draws."""

    def __init__(self, args: list[str], env: dict[str, str], rows: int = 24, columns: int = 70):
        command = [sys.executable, "-m", *args]
        self.child = pexpect.spawn(
            command[0], command[1:], env=env, cwd=str(ROOT), dimensions=(rows, columns), timeout=30
        )
        self.child.delaybeforesend = None
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def _pump(self, seconds: float) -> bool:
        try:
            data = self.child.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def until(self, words: str, count: int = 1, seconds: float = 20) -> None:
        """Wait for words on the screen, so many times."""
        end = time.monotonic() + seconds
        while self.text().count(words) < count:
            assert self._pump(0.05), f"ended before {words!r}:\n{self.text()}"
            assert time.monotonic() < end, f"no {words!r} on the screen:\n{self.text()}"

    def ready(self) -> None:
        """Wait for the prompt in the last row that holds something."""
        end = time.monotonic() + 60
        while not self.text().splitlines()[-1:] or not re.fullmatch(
            r"> ?", self.text().splitlines()[-1]
        ):
            assert self._pump(0.05)
            assert time.monotonic() < end, f"no prompt:\n{self.text()}"

    def enter(self, line: str) -> None:
        self.ready()
        self.child.send(line + "\r")

    def leave(self) -> int:
        """Ctrl-D at the prompt; the exit code."""
        self.ready()
        self.child.sendeof()
        return self.finish()

    def finish(self) -> int:
        """Wait for the end; the exit code."""
        end = time.monotonic() + 20
        while self._pump(0.05):
            assert time.monotonic() < end, f"it does not end:\n{self.text()}"
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -1

    def text(self) -> str:
        """What scrolled away and what stands there, without blank space at the ends."""
        gone = [
            "".join(row[x].data for x in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return "\n".join([*gone, *(row.rstrip() for row in self.screen.display)]).strip("\n")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `homespec chat` or, with a script, a chat whose answers are known."""
    started: list[Terminal] = []

    def begin(*args: object, script: dict[str, Any] | None = None, **env: str) -> Terminal:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path / "state")}
        environment |= {"HOMESPEC_THREADS": "1", **env}
        if script is None:
            command = ["homespec", "chat", *map(str, args)]
        else:
            path = tmp_path / "script.json"
            path.write_text(json.dumps(script))
            command = ["tests.scripted_chat", str(path), str(tmp_path / "messages.json")]
        terminal = Terminal(command, environment)
        started.append(terminal)
        return terminal

    yield begin
    for terminal in started:
        terminal.child.close(force=True)


def said(tmp_path: Path) -> list[str]:
    """What the scripted chat held at its end."""
    return [m["content"] for m in json.loads((tmp_path / "messages.json").read_text())]


def test_a_transcript_to_the_letter(start: Start, tmp_path: Path) -> None:
    terminal = start(
        script={
            "answers": [
                ["Blue, ", "because **Rayleigh", "** scatters it.\n\n- one\n", "- two"],
                ["<think>\nhm, ", "sunset\n</thi", "nk>\n\nRed."],
            ]
        }
    )
    terminal.enter("Why is the sky blue?")
    terminal.enter("And at sunset?")
    terminal.enter("/undo")
    terminal.enter("/explain")
    assert terminal.leave() == 0
    assert terminal.text().splitlines() == [
        "> Why is the sky blue?",
        "Blue, because Rayleigh scatters it.",
        "",
        " • one",
        " • two",
        "",
        "20.0 tok/s · 1.25x plain (estimated) · 50% of drafts accepted ·",
        "context 10 of 1,000",
        "> And at sunset?",
        "hm, sunset",
        "",
        "Red.",
        "",
        "20.0 tok/s · 1.25x plain (estimated) · 33% of drafts accepted ·",
        "context 23 of 1,000",
        "> /undo",
        "Taken back: And at sunset?",
        "> /explain",
        "There is nothing to explain before an answer.",
        ">",
    ]


def test_escapes_of_the_model_do_not_reach_the_terminal(start: Start) -> None:
    evil = ["\x1b]0;title\x07", "\x1b[2J\x1b[31m", "\x9b31m", "a\rb\x08", "\u202eabc\u2066"]
    script = {"answers": [[*evil, "\n\ndone"]] * 2, "notice": "Template \x1b[2J says"}
    for extra in ({}, {"show_accepted": True}):
        terminal = start(script={**script, **extra})
        terminal.enter("hi")
        terminal.until("tok/s")
        assert terminal.leave() == 0
        answer = terminal.raw[terminal.raw.index(b"Template") : terminal.raw.index(b"tok/s")]
        for sequence in (
            b"\x1b]0;",
            b"\x1b[2J",
            b"\x1b[31m",
            b"\x9b31m",
            b"\x08",
            "\u202e".encode(),
        ):
            assert sequence.replace(b"\x9b", "\x9b".encode()) not in answer
        assert "title" in terminal.text()


def test_ctrl_c_stops_the_answer_and_keeps_what_came(start: Start, tmp_path: Path) -> None:
    terminal = start(script={"answers": [["word "] * 400] * 2, "delay": 0.05})
    terminal.enter("talk")
    terminal.until("word word word")
    terminal.child.sendintr()
    terminal.until("tok/s")
    time.sleep(1.1)  # later than that it is no second one
    terminal.ready()
    terminal.child.sendintr()
    terminal.until("once more leaves")
    terminal.child.sendintr()
    assert terminal.finish() == 130
    question, answer = said(tmp_path)
    assert question == "talk"
    assert 2 < answer.count("word ") < 300


def test_ctrl_c_twice_leaves_from_within_an_answer(start: Start, tmp_path: Path) -> None:
    terminal = start(script={"answers": [["word "] * 400], "delay": 0.1})
    terminal.enter("talk")
    terminal.until("word word")
    terminal.child.sendintr()
    time.sleep(0.02)
    terminal.child.sendintr()
    assert terminal.finish() == 130
    assert said(tmp_path)[0] == "talk"


def test_typing_ahead_waits_for_its_turn(start: Start, tmp_path: Path) -> None:
    terminal = start(script={"answers": [["word "] * 20, ["second"]], "delay": 0.03})
    terminal.enter("first")
    terminal.until("word word")
    terminal.child.send("next question\r")
    terminal.until("second")
    assert "wordnext" not in terminal.text().replace(" ", "")
    assert terminal.leave() == 0
    assert said(tmp_path)[2] == "next question"


def test_a_resize_in_mid_answer_loses_nothing(start: Start) -> None:
    words = [f"word{i} " for i in range(120)]
    terminal = start(script={"answers": [words], "delay": 0.02})
    terminal.enter("talk")
    terminal.until("word30")
    terminal.child.setwinsize(24, 41)
    terminal.screen.resize(24, 41)
    terminal.until("word60")
    terminal.child.setwinsize(24, 90)
    terminal.screen.resize(24, 90)
    terminal.until("tok/s")
    assert terminal.leave() == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.raw).decode()
    shown = re.findall(r"word\d+", plain)
    assert shown == [word.strip() for word in words]


def test_a_paste_of_100_kb_is_one_message(start: Start, tmp_path: Path) -> None:
    text = "\n".join(f"line {i} of a long paste, with /slashes and \ttabs" for i in range(2300))
    assert len(text) > 100_000
    terminal = start(script={"answers": [["got it"]], "n_ctx": 100_000})
    terminal.ready()
    began = time.monotonic()
    terminal.child.send(f"\x1b[200~{text}\x1b[201~")
    terminal.child.send(" what is it?\r")
    terminal.until("got it")
    assert time.monotonic() - began < 15
    assert terminal.leave() == 0
    assert said(tmp_path)[0] == f"{text} what is it?"


def test_wide_characters_emoji_and_right_to_left(start: Start, tmp_path: Path) -> None:
    answer = ["日本語の", "文章。👩\u200d", "👩\u200d👧 🇩", "🇪 ", "שלום עולם ", "مرحبا"]
    terminal = start(script={"answers": [answer]})
    terminal.enter("你好 😀 שלום")
    terminal.until("tok/s")
    assert terminal.leave() == 0
    assert said(tmp_path) == ["你好 😀 שלום", "".join(answer)]
    assert "".join(answer).encode() in re.sub(rb"\x1b\[[0-9;]*m", b"", terminal.raw)


def test_several_lines_blocks_and_completion(start: Start, tmp_path: Path) -> None:
    terminal = start(script={"answers": [["a"], ["b"], ["c"], ["d"]]})
    terminal.ready()
    terminal.child.send('"""\rone\rtwo"""\r')
    terminal.until("tok/s", 1)
    terminal.ready()
    terminal.child.send("three\\\rfour\x1b\rfive\r")
    terminal.until("tok/s", 2)
    terminal.ready()
    terminal.child.send("/exp\t")
    terminal.until("/explain")
    terminal.child.send("\r")
    terminal.until("As the script has it.")
    terminal.enter("/edit")
    terminal.until("five", 2)
    terminal.child.send("!\r")
    terminal.until("tok/s", 3)
    terminal.enter("//etc is a folder")
    terminal.until("tok/s", 4)
    assert terminal.leave() == 0
    assert said(tmp_path) == [
        *("one\ntwo", "a", "three\nfour\nfive!", "c"),
        *("/etc is a folder", "d"),
    ]


def test_no_color_and_copy(start: Start) -> None:
    terminal = start(script={"answers": [["**bold** `code`"]]}, NO_COLOR="1")
    terminal.enter("hi")
    terminal.until("tok/s")
    terminal.enter("/copy")
    terminal.until("asked to copy 15")
    assert terminal.leave() == 0
    assert not re.search(rb"\x1b\[[0-9;]*(3|4|9)[0-7][;m]", terminal.raw)
    copied = base64.b64encode(b"**bold** `code`")
    assert b"\x1b]52;c;" + copied + b"\x07" in terminal.raw


def test_folded_reasoning(start: Start) -> None:
    script = {"answers": [["<think>secret", "</think>", "Open."]], "settings": {"fold": True}}
    terminal = start(script=script)
    terminal.enter("hi")
    terminal.until("tok/s")
    assert "secret" not in terminal.text()
    assert re.search(r"Thinking … \d+\.\d s \(/fold off shows it\)\n\nOpen\.", terminal.text())


def test_a_dumb_terminal_gets_no_escapes(start: Start) -> None:
    terminal = start(script={"answers": [["**a** \x1b[2J", "b"]]}, TERM="dumb")
    terminal.enter("hi")
    terminal.until("tok/s")
    assert terminal.leave() == 0
    assert "**a** \ufffd[2Jb" in terminal.text()
    assert b"\x1b" not in terminal.raw


def chat(*args: object, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "homespec", "chat", *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HOMESPEC_THREADS": "1"} | env,
    )


def test_a_pipe_is_answered_once(tiny: Path) -> None:
    done = chat("-m", tiny, "-n", 12, "--temp", 0, stdin="hi\nthere\n")
    again = chat(tiny, "-n", 12, "--temp", 0, "-p", "hi\nthere\n")
    assert (done.returncode, again.returncode) == (0, 0)
    assert done.stdout == again.stdout != ""
    assert "\x1b" not in done.stdout + done.stderr
    assert "tok/s" not in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-c", "32", "-p", "long " * 50], 1, "the context holds 32"),
        (["-p", ""], 2, "empty"),
        (["--session", "a/b", "-p", "x"], 2, "no name for a session"),
        (["-m", "other", "-p", "x"], 2, "both name a model"),
    ],
)
def test_a_mistake_is_one_sentence(tiny: Path, args: list[str], code: int, words: str) -> None:
    done = chat(tiny, *args)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_template_that_refuses_the_system_prompt_is_quoted(tmp_path: Path) -> None:
    refuses = (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    model = write_tiny_gguf(tmp_path / "gemma.gguf", chat_template=refuses + CHAT_TEMPLATE)
    done = chat(model, "-n", 4, "-sys", "Be brief.", stdin="hi")
    assert done.returncode == 0
    assert "The model's chat template says: System role not supported." in done.stderr
    assert "put before the first message" in done.stderr


def test_a_session_with_the_starter_pays_for_new_tokens_alone(start: Start, starter: Path) -> None:
    def stats(terminal: Terminal) -> tuple[int, int]:
        terminal.enter("/stats")
        terminal.until("known already")
        found = re.findall(r"([\d,]+) tokens, ([\d,]+) of them", terminal.text())[-1]
        return int(found[0]), int(found[1])

    terminal = start("-m", starter, "--temp", "0", "-n", "12", "--session", "s")
    terminal.enter("Name three colours.")
    terminal.until("tok/s", 1, 60)
    terminal.enter("And three more.")
    terminal.until("tok/s", 2, 60)
    prompt, cached = stats(terminal)
    assert prompt - cached < 20 < cached
    assert terminal.leave() == 0

    terminal = start("-m", starter, "--temp", "0", "-n", "12", "--session", "s")
    terminal.enter("Thanks.")
    terminal.until("tok/s", 1, 60)
    longer, cached = stats(terminal)
    assert longer > prompt
    assert longer - cached < 20
    terminal.child.kill(signal.SIGTERM)
    assert terminal.finish() == 130
