"""The slash commands: what each is called, takes and does. None of them prints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homespec.chat import settings as names
from homespec.chat.conversation import Conversation, Turn
from homespec.chat.reasoning import without_reasoning
from homespec.chat.session import load_file, save_file
from homespec.chat.window import turn_starts
from homespec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command comes to: lines to show, and perhaps something to do.

    turn: an answer to show. edit: a message to put into the input line; what is entered then
    replaces the last one. copy: text for the clipboard. leave: the chat is over.
    """

    lines: tuple[str, ...] = ()
    turn: Turn | None = None
    edit: str | None = None
    copy: str | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command. choices: what may follow, for completion; "FILE" stands for a path."""

    run: Callable[[Conversation, str], Outcome]
    usage: str
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


def is_command(line: str) -> bool:
    """Whether a line is meant as a command; `//` begins a message with a slash."""
    return line.startswith("/") and not line.startswith("//") and "\n" not in line.rstrip()


def message_of(line: str) -> str:
    """A line as the message it means."""
    return line[1:] if line.startswith("//") else line


def run(conversation: Conversation, line: str) -> Outcome:
    """Do what a line says. Raises HomespecErrors, which change nothing."""
    word, _, rest = line.strip().partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1)
        raise UsageError(
            f"There is no command {word}.",
            hint=f"Did you mean {near[0]}? /help lists them; // begins a message with a slash."
            if near
            else "/help lists them; // begins a message with a slash.",
        )
    return COMMANDS[name].run(conversation, rest.strip())


def _help(conversation: Conversation, rest: str) -> Outcome:
    width = max(len(command.usage) for command in COMMANDS.values())
    return Outcome((*(f"{c.usage:{width}}  {c.help}" for c in COMMANDS.values()), "", *KEYS))


KEYS = (
    "Enter sends; Alt-Enter, Ctrl-J or a \\ at the end of the line begins a new one;",
    '""" begins and ends a block of lines. Ctrl-X Ctrl-E opens your editor.',
    "Ctrl-C stops an answer and keeps what came; Ctrl-D, or Ctrl-C twice, leaves.",
)


def _exit(conversation: Conversation, rest: str) -> Outcome:
    return Outcome(leave=True)


def _clear(conversation: Conversation, rest: str) -> Outcome:
    conversation.clear()
    return Outcome(("The conversation is empty; system prompt and settings stay.",))


def _regen(conversation: Conversation, rest: str) -> Outcome:
    return Outcome(turn=conversation.regenerate())


def _undo(conversation: Conversation, rest: str) -> Outcome:
    return Outcome((f"Taken back: {_short(conversation.undo())}",))


def _edit(conversation: Conversation, rest: str) -> Outcome:
    if rest:
        return Outcome(turn=conversation.edit(rest))
    return Outcome(edit=conversation.last_message())


def _read(conversation: Conversation, rest: str) -> Outcome:
    path = _path(rest, "/read")
    try:
        text = path.read_text("utf-8")
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not UTF-8 text.") from exc
    if "\0" in text:
        raise UsageError(f"{path} is no text file.")
    if not text.strip():
        raise UsageError(f"{path} is empty.")
    conversation.attached.append((path.name, text))
    return Outcome((f"{path.name}, {len(text):,} characters, goes with your next message.",))


def _save(conversation: Conversation, rest: str) -> Outcome:
    path = _path(rest, "/save")
    save_file(conversation, path)
    return Outcome((f"Saved {len(conversation.messages)} messages to {path}.",))


def _load(conversation: Conversation, rest: str) -> Outcome:
    notes = load_file(conversation, _path(rest, "/load"))
    return Outcome((f"Loaded {len(conversation.messages)} messages.", *notes))


def _path(rest: str, command: str) -> Path:
    text = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "\"'" else rest
    if not text:
        raise UsageError(f"{command} needs the name of a file.")
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"{text} names no home folder that is known here.") from exc


def _system(conversation: Conversation, rest: str) -> Outcome:
    if not rest:
        return Outcome((conversation.system or "There is no system prompt.",))
    text = _unquoted(rest)
    conversation.system = text or None
    conversation.changed()
    if not text:
        return Outcome(("There is no system prompt any more.",))
    return Outcome(("The system prompt is set; the conversation is read anew with it.",))


def _unquoted(text: str) -> str:
    for mark in ('"""', '"'):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            return text[len(mark) : -len(mark)].strip()
    return text


def _set(conversation: Conversation, rest: str) -> Outcome:
    what, _, value = rest.partition(" ")
    value = value.strip()
    if what == "parameter":
        name, _, text = value.partition(" ")
        if not name or not text.strip():
            raise UsageError(
                "/set parameter needs a name and a value.",
                hint=f"Names: {', '.join(names.PARAMETERS)}.",
            )
        changed = names.set_parameter(conversation.settings, name, text.strip())
        return _with(conversation, changed, f"{name} is {text.strip()}.")
    if what == "system":
        return _system(conversation, value or '""')
    simple: dict[str, tuple[dict[str, Any], str]] = {
        "think": ({"think": True}, "The template is asked for reasoning."),
        "nothink": ({"think": False}, "The template is asked for no reasoning."),
        "verbose": ({"stats": True}, "A line of figures follows each answer."),
        "quiet": ({"stats": False}, "No figures follow the answers."),
    }
    if what not in simple:
        raise UsageError(
            f"/set knows no {what!r}." if what else "/set needs to know what.",
            hint="parameter NAME VALUE, system TEXT, think, nothink, verbose or quiet.",
        )
    fields, line = simple[what]
    return _with(conversation, replace(conversation.settings, **fields), line)


def _with(conversation: Conversation, changed: names.Settings, line: str) -> Outcome:
    conversation.settings = changed
    conversation.changed()
    return Outcome((line,))


def _show(conversation: Conversation, rest: str) -> Outcome:
    parts = {
        "info": lambda: _rows([*conversation.engine.describe(), *_state(conversation)]),
        "parameters": lambda: _rows(names.parameters(conversation.settings)),
        "system": lambda: [conversation.system or "There is no system prompt."],
        "messages": lambda: _messages(conversation) or ["There are no messages yet."],
    }
    if rest and rest not in parts:
        raise UsageError(f"/show knows no {rest!r}.", hint=f"It knows {', '.join(parts)}.")
    return Outcome(tuple(parts[rest or "info"]()))


def _state(conversation: Conversation) -> list[tuple[str, str]]:
    used, n_ctx = conversation.used(), conversation.engine.n_ctx
    turns = len(turn_starts(conversation.messages))
    left = len(turn_starts(conversation.messages[: conversation.start]))
    held = f"{turns}" if not left else f"{turns}, of which the oldest {left} no longer fit"
    rows = [
        ("context", f"{used:,} of {n_ctx:,} tokens ({used / n_ctx:.0%})"),
        ("turns", held),
        ("system", _short(conversation.system or "none")),
        ("draft depth", names.draft_words(conversation.settings)),
    ]
    if conversation.attached:
        rows.append(("to be sent", ", ".join(name for name, _ in conversation.attached)))
    return rows


def _messages(conversation: Conversation) -> list[str]:
    lines = []
    for i, message in enumerate(conversation.messages):
        gone = " (no longer sent)" if i < conversation.start else ""
        lines += [f"{message['role']}{gone}:", message["content"], ""]
    return lines


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def _stats(conversation: Conversation, rest: str) -> Outcome:
    if rest in ("on", "off"):
        return _set(conversation, "verbose" if rest == "on" else "quiet")
    if rest:
        raise UsageError(f"/stats takes on, off or nothing, not {rest!r}.")
    if conversation.last is None:
        raise UsageError("There are no figures before an answer.")
    f = conversation.last.figures
    rows = [
        (
            "prompt",
            f"{f.num_prompt_tokens:,} tokens, {f.num_cached_tokens:,} of them known already",
        ),
        ("first token", f"{f.first_token_seconds:.2f} s"),
        ("answer", f"{f.num_tokens:,} tokens, {f.tokens_per_second:.1f} a second"),
    ]
    if f.num_drafted:
        share = f.num_accepted / f.num_drafted
        rows.append(("drafted", f"{f.num_drafted:,} tokens, {share:.0%} accepted"))
    if f.speedup is not None:
        rows.append(("speed", f"{f.speedup:.2f} of plain decoding, as estimated"))
    return Outcome(tuple(_rows(rows)))


def _draft(conversation: Conversation, rest: str) -> Outcome:
    if not rest:
        return Outcome((f"The draft depth is {names.draft_words(conversation.settings)}.",))
    changed = names.set_draft(conversation.settings, rest)
    return _with(conversation, changed, f"The draft depth is {names.draft_words(changed)}.")


def _explain(conversation: Conversation, rest: str) -> Outcome:
    if conversation.last is None:
        raise UsageError("There is nothing to explain before an answer.")
    return Outcome(conversation.last.explanation or ("The engine gives no reasons.",))


def _copy(conversation: Conversation, rest: str) -> Outcome:
    answers = conversation.answers()
    if not answers:
        raise UsageError("There is no answer to copy yet.")
    text = without_reasoning(answers[-1])
    if rest == "code":
        blocks = _FENCE.findall(text)
        if not blocks:
            raise UsageError("The last answer has no code block.", hint="/copy takes all of it.")
        text = blocks[-1][1]
    elif rest:
        raise UsageError(f"/copy takes code or nothing, not {rest!r}.")
    return Outcome(copy=text.strip("\n"))


_FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n]*\n(.*?)^[ ]{0,3}\1", re.MULTILINE | re.DOTALL)


def _fold(conversation: Conversation, rest: str) -> Outcome:
    if rest not in ("", "on", "off"):
        raise UsageError(f"/fold takes on, off or nothing, not {rest!r}.")
    fold = not conversation.settings.fold if not rest else rest == "on"
    line = "Reasoning is folded." if fold else "Reasoning is shown."
    return _with(conversation, replace(conversation.settings, fold=fold), line)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:69]}…"


COMMANDS: dict[str, Command] = {
    "/help": Command(_help, "/help", "these lines", ("/?",)),
    "/exit": Command(_exit, "/exit", "leave (also /bye, Ctrl-D)", ("/bye", "/quit")),
    "/clear": Command(_clear, "/clear", "forget the conversation"),
    "/regen": Command(_regen, "/regen", "answer the last message anew", ("/retry",)),
    "/undo": Command(_undo, "/undo", "take the last turn back"),
    "/edit": Command(_edit, "/edit [TEXT]", "change the last message, and answer that"),
    "/read": Command(_read, "/read FILE", "send a text file with the next message", (), ("FILE",)),
    "/save": Command(_save, "/save FILE", "write messages, model and settings", (), ("FILE",)),
    "/load": Command(_load, "/load FILE", "go on with a saved conversation", (), ("FILE",)),
    "/system": Command(_system, "/system [TEXT]", 'set the system prompt; "" for none'),
    "/set": Command(
        _set,
        "/set parameter NAME VALUE",
        "also: system TEXT, think, nothink, verbose, quiet",
        (),
        ("parameter", "system", "think", "nothink", "verbose", "quiet"),
    ),
    "/show": Command(
        _show,
        "/show [WHAT]",
        "info, parameters, system or messages",
        (),
        ("info", "parameters", "system", "messages"),
    ),
    "/stats": Command(_stats, "/stats [on|off]", "figures of the last answer", (), ("on", "off")),
    "/draft": Command(
        _draft, "/draft N|auto|off", "how many tokens to draft a round", (), ("auto", "off")
    ),
    "/explain": Command(_explain, "/explain", "why it drafted as it did"),
    "/fold": Command(_fold, "/fold [on|off]", "hide or show reasoning", (), ("on", "off")),
    "/copy": Command(_copy, "/copy [code]", "the last answer to the clipboard", (), ("code",)),
}

ALIASES = {alias: name for name, command in COMMANDS.items() for alias in command.aliases}
