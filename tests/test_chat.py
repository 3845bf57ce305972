"""The conversation without a terminal: turns, window, commands, files, reasoning, templates."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from homespec.chat import commands, session, transcript
from homespec.chat.conversation import Conversation
from homespec.chat.reasoning import ReasoningSplitter, whole, without_reasoning
from homespec.chat.settings import PARAMETERS, Settings, set_parameter
from homespec.chat.template import render
from homespec.chat.types import Message
from homespec.decoding.sampling import SamplingParams
from homespec.errors import CannotRunError, ContextFullError, RefusedError, UsageError
from homespec.generation import GenerateParams

from tests.scripted_chat import ScriptedEngine


def say(conversation: Conversation, line: str) -> list[str]:
    """Enter a line, let the answer come; the notices and lines shown."""
    if commands.is_command(line):
        outcome = commands.run(conversation, line)
        lines, turn = list(outcome.lines), outcome.turn
    else:
        lines, turn = [], conversation.ask(commands.message_of(line))
    if turn is None:
        return lines
    lines += turn.notices
    for _ in turn:
        pass
    return lines + turn.end()[1]


def contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def talk(*lines: str, answers: int = 9, n_ctx: int = 1000) -> Conversation:
    engine = ScriptedEngine([[f"a{i}"] for i in range(1, answers + 1)], n_ctx)
    conversation = Conversation(engine, system="sys")
    for line in lines:
        say(conversation, line)
    return conversation


def test_undo_regen_and_edit_leave_the_conversation_one_expects() -> None:
    conversation = talk("q1", "q2")
    assert contents(conversation.messages) == ["q1", "a1", "q2", "a2"]
    say(conversation, "/regen")
    assert contents(conversation.messages) == ["q1", "a1", "q2", "a3"]
    say(conversation, "/edit q3")
    assert contents(conversation.messages) == ["q1", "a1", "q3", "a4"]
    assert contents(conversation.engine.asked[-1]) == ["sys", "q1", "a1", "q3"]
    say(conversation, "/undo")
    assert contents(conversation.messages) == ["q1", "a1"]
    say(conversation, "/clear")
    for line in ("/undo", "/regen", "/edit", "/copy", "/stats", "/explain"):
        with pytest.raises(UsageError):
            say(conversation, line)
    assert conversation.messages == []


def test_an_answer_stopped_before_its_first_word_changes_nothing() -> None:
    conversation = talk("q1")
    for begin in (lambda: conversation.ask("q2"), conversation.regenerate):
        turn = begin()
        conversation.engine.aborted = True
        with pytest.raises(KeyboardInterrupt):
            next(iter(turn))
        _, notices = turn.end()
        assert "as before" in notices[0]
        assert contents(conversation.messages) == ["q1", "a1"]


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    conversation = Conversation(ScriptedEngine([["one ", "two ", "three"]]))
    turn = conversation.ask("count")
    pieces = iter(turn)
    assert next(pieces).text == "one "
    turn.end()
    assert contents(conversation.messages) == ["count", "one "]


def test_a_fixed_seed_moves_on_with_each_new_try() -> None:
    engine = ScriptedEngine([["a"]] * 4)
    conversation = Conversation(engine, Settings(SamplingParams(seed=7)))
    for line in ("q1", "/regen", "/regen", "q2"):
        say(conversation, line)
    assert [settings.sampling.seed for settings in engine.settings] == [7, 8, 9, 7]


def test_the_oldest_turns_are_left_out_whole_and_it_is_told() -> None:
    # system 2 tokens, a turn 2 + 2 x 12; room 25, and a quarter more goes when something must
    engine = ScriptedEngine([["w " * 11] for _ in range(12)], n_ctx=100)
    conversation = Conversation(engine, system="sys")
    told = [say(conversation, f"q{i} " + "w " * 10) for i in range(9)]
    assert [bool(lines) for lines in told].count(True) >= 2
    assert [bool(lines) for lines in told].count(True) < 5  # not at every turn
    for asked in engine.asked:
        assert asked[0]["content"] == "sys"
        assert asked[1]["role"] == "user"
        assert engine.measure(asked, conversation.settings).num_tokens <= 75
    assert len(conversation.messages) == 18  # nothing is forgotten, only not sent
    shown = "\n".join(commands.run(conversation, "/show").lines)
    assert f"{conversation.used():,} of 100 tokens" in shown
    assert "no longer fit" in shown


def test_a_message_that_cannot_fit_is_refused_with_both_numbers() -> None:
    conversation = talk("q1", n_ctx=100)
    with pytest.raises(ContextFullError, match=r"203 tokens.* holds 100"):
        conversation.ask("w " * 200)
    assert contents(conversation.messages) == ["q1", "a1"]
    say(conversation, "w " * 70)  # this one fits alone
    assert conversation.start == 2


def test_an_answer_that_is_cut_says_so(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("some words")
    conversation = talk("q1")
    assert say(conversation, f"/read {path}") == [
        "long.txt, 10 characters, goes with your next message."
    ]
    say(conversation, "what is this?")
    assert conversation.messages[-2]["content"] == "long.txt:\n\nsome words\n\nwhat is this?"
    say(conversation, "next")
    assert conversation.messages[-2]["content"] == "next"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hlep", "/help"),
        ("/set parameter temprature 1", "temperature"),
        ("/set parameter temperature warm", "a number"),
        ("/set parameter top_p 2", "between 0 and 1"),
        ("/set parameter num_ctx 8192", "-c"),
        ("/set", "parameter NAME"),
        ("/draft 99", "auto, off"),
        ("/show me", "parameters"),
        ("/read", "name of a file"),
        ("/read /nonexistent", "cannot be read"),
        ("/load {dir}/none.json", "cannot be read"),
        ("/load {dir}/text.txt", "no saved chat"),
        ("/save {dir}/text.txt", "no saved chat"),
        ("/read {dir}/binary", "no text file"),
        ("/copy it", "code or nothing"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(
    line: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("my notes")
    (tmp_path / "binary").write_bytes(b"a\0b")
    conversation = talk("q1")
    before = session.of(conversation)
    with pytest.raises(UsageError) as caught:
        say(conversation, line.replace("{dir}", str(tmp_path)))
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert session.of(conversation) == before
    assert (tmp_path / "text.txt").read_text() == "my notes"


def test_parameters_are_set_by_ollamas_names_and_shown() -> None:
    settings = Settings()
    for name, text in (
        ("temperature", "0.1"),
        ("temp", "0.5"),
        ("num_predict", "12"),
        ("seed", "42"),
        ("stop", "'###' END"),
        ("repeat_penalty", "1.1"),
    ):
        settings = set_parameter(settings, name, text)
    assert settings.sampling == SamplingParams(temperature=0.5, seed=42, repeat_penalty=1.1)
    assert settings.generate == GenerateParams(max_tokens=12, stop=("###", "END"))
    assert set_parameter(settings, "num_predict", "-1").generate.max_tokens is None
    assert set_parameter(settings, "seed", "-1").sampling.seed is None
    shown = commands.run(talk(), "/show parameters").lines
    assert [line.split()[0] for line in shown] == list(PARAMETERS)


def test_draft_depth_and_switches() -> None:
    conversation = talk("q1")
    for line, spec_type, depth, tokens in (
        ("/draft off", "none", "adaptive", None),
        ("/draft 4", None, "fixed", 4),
        ("/draft auto", None, "adaptive", None),
    ):
        say(conversation, line)
        generate = conversation.settings.generate
        assert (generate.spec_type, generate.depth, generate.draft_depth) == (
            spec_type,
            depth,
            tokens,
        )
    say(conversation, "/set nothink")
    say(conversation, "/stats off")
    say(conversation, "/fold on")
    settings = conversation.settings
    assert (settings.think, settings.stats, settings.fold) == (False, False, True)


def test_a_saved_chat_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    conversation = talk("q1", "/set parameter stop ###", "/set parameter seed 3", f"/save {path}")
    other = talk()
    assert say(other, f'/load "{path}"') == ["Loaded 2 messages."]
    assert session.of(other) == session.of(conversation)
    say(other, f"/save {path}")  # a saved chat may be written over
    whole_file = json.loads(path.read_text())
    for key, value in (
        ("version", 2),
        ("format", "other"),
        ("extra", 1),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("settings", {"sampling": {"warmth": 1}}),
        ("settings", {"sampling": {"temperature": -1}}),
        ("start", 99),
    ):
        path.write_text(json.dumps({**whole_file, key: value}))
        with pytest.raises(UsageError):
            transcript.read(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_session_is_kept_and_has_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = session.Session("trip")
    conversation = Conversation(ScriptedEngine([["a1"]]), system="sys")
    assert first.attach(conversation) == []
    with pytest.raises(CannotRunError, match="open in another process"):
        session.Session("trip")
    say(conversation, "q1")
    kept = transcript.read(first.folder / "chat.json")  # before it is closed
    assert contents(kept.messages) == ["q1", "a1"]
    first.close()
    first.release()
    assert (first.folder / "scripted.cache").exists()
    assert (first.folder / "chat.json").stat().st_mode & 0o077 == 0

    second = session.Session("trip")
    again = Conversation(ScriptedEngine([]))
    assert second.attach(again) == []
    assert contents(again.sent(again.messages)) == ["sys", "q1", "a1"]
    second.release()
    for name in ("../trip", "", ".", "a/b"):
        with pytest.raises(UsageError):
            session.Session(name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "said"),
    [
        ("<think>\nhm <b> </thin\n</think>\n\nYes. <think>x", "", "hm <b> </thin", "Yes. <think>x"),
        ("hm\n</think>\nYes", "<think>", "hm", "Yes"),
        ("  <thinking>a</thinking>b", "", "a", "b"),
        ("[THINK]a[/THINK]b", "", "a", "b"),
        ("<thin ice", "", "", "<thin ice"),
        ("<think>never closed", "", "never closed", ""),
        ("  plain", "", "", "  plain"),
    ],
)
def test_reasoning_is_told_from_the_answer(
    text: str, opened: str, reasoning: str, said: str, seed: int
) -> None:
    splitter, rng = ReasoningSplitter(opened), random.Random(seed)
    pieces: list[tuple[str, bool]] = []
    rest = text
    while rest:
        cut = rng.randint(1, 4)
        pieces += splitter.push(rest[:cut])
        rest = rest[cut:]
    pieces += splitter.flush()
    assert "".join(piece for piece, inside in pieces if inside) == reasoning
    assert "".join(piece for piece, inside in pieces if not inside) == said


def test_reasoning_that_was_stopped_is_closed_in_the_history() -> None:
    assert whole("hm", "<think>") == "<think>\nhm\n</think>\n\n"
    assert whole("hm</think>Yes", "<think>") == "<think>\nhm</think>Yes"
    assert whole("Yes", "") == "Yes"
    assert without_reasoning("<think>hm</think>\nYes") == "Yes"


class Template:
    """Templates as models have them, with their own words."""

    def __init__(self, *rules: str) -> None:
        self.rules = rules

    def __call__(self, messages: list[Message]) -> str:
        roles = [message["role"] for message in messages]
        if "no system" in self.rules and "system" in roles:
            raise RefusedError("refused") from ValueError("System role not supported")
        turns = [role for role in roles if role != "system"]
        if "alternate" in self.rules and any(
            role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)
        ):
            raise RefusedError("refused") from ValueError("Conversation roles must alternate")
        if "deaf" in self.rules:
            messages = [message for message in messages if message["role"] != "system"]
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


SYSTEM, Q, A = (
    {"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant")
)


@pytest.mark.parametrize(
    ("rules", "messages", "text", "words"),
    [
        ((), [SYSTEM, Q], "<system>S<user>U", ""),
        (("no system",), [Q, A, Q], "<user>U<assistant>A<user>U", ""),
        (("no system",), [SYSTEM, Q], "<user>S\n\nU", "System role not supported"),
        (("deaf",), [SYSTEM, Q], "<user>S\n\nU", "leaves the system prompt out"),
        (("alternate",), [Q, Q, A], "<user>U\n\nU<assistant>A", "roles must alternate"),
        (("alternate", "no system"), [SYSTEM, Q, Q], "<user>S\n\nU\n\nU", "not supported"),
    ],
)
def test_a_template_that_refuses_is_quoted_and_what_was_done_told(
    rules: tuple[str, ...], messages: list[Message], text: str, words: str
) -> None:
    rendered = render(messages, Template(*rules))
    assert rendered.text == text
    assert words in rendered.notice
    assert bool(words) == bool(rendered.notice)


def test_a_template_that_takes_nothing_is_quoted() -> None:
    with pytest.raises(RefusedError) as caught:
        render([A, SYSTEM], Template("alternate"))
    assert "must alternate" in str(caught.value.__cause__)


def test_a_notice_of_the_template_is_told_once() -> None:
    conversation = talk()
    conversation.engine.notice = "The template says no."
    assert say(conversation, "q1") == ["The template says no."]
    assert say(conversation, "q2") == []
