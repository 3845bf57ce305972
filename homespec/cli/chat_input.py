"""Where a user's lines come from: an editor in a terminal, or plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from homespec import paths
from homespec.cli.chat_completer import SlashCompleter
from homespec.errors import UsageError

BLOCK = '"""'


class Editor(Protocol):
    """Reads what a user enters."""

    def read(self, prefill: str = "") -> str:
        """The next message or command.

        Raises EOFError at the end, KeyboardInterrupt for Ctrl-C in an empty line.
        """
        ...


class LineEditor:
    """prompt_toolkit's editor: history, several lines, pastes as they are, completion."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=SlashCompleter(),
            complete_while_typing=False,
            enable_open_in_editor=True,
            multiline=True,
            output=_output(),
            key_bindings=_bindings(),
            prompt_continuation=lambda width, number, wrapped: FormattedText(
                [("class:prompt", "  " if wrapped else "… ")]
            ),
        )

    def read(self, prefill: str = "") -> str:
        """The next message or command."""
        prompt = FormattedText([("class:prompt bold", "> ")])
        return unwrapped(self._session.prompt(prompt, default=prefill))


class PlainLines:
    """Lines of standard input, for terminals that can do no more; the prompt is on stderr."""

    def read(self, prefill: str = "") -> str:
        """The next message or command; lines end with a backslash, or stand in a block."""
        if prefill:
            print(f"Enter what is to replace: {prefill}", file=sys.stderr)
        text = self._line("> ")
        while goes_on(text):
            text = joined(text) + self._line("… ")
        return unwrapped(text)

    def _line(self, prompt: str) -> str:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


def goes_on(text: str) -> bool:
    """Whether a text asks for another line: a block is open, or its last line ends so."""
    return is_block_open(text) or (text.endswith("\\") and not text.endswith("\\\\"))


def is_block_open(text: str) -> bool:
    """Whether a block of lines was begun and not ended."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def joined(text: str) -> str:
    """A text that goes on, ready for its next line."""
    return (text if is_block_open(text) else text[:-1]) + "\n"


def unwrapped(text: str) -> str:
    """A message without the marks of its block."""
    stripped = text.strip()
    if len(stripped) >= 2 * len(BLOCK) and stripped.startswith(BLOCK) and stripped.endswith(BLOCK):
        return stripped[len(BLOCK) : -len(BLOCK)].strip("\n")
    return text.rstrip()


def _output() -> Output:
    """The terminal, never asked where its cursor is: a late reply would stand in what follows."""
    output = create_output()
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False
    return output


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None
        elif goes_on(buffer.text):
            _new_line(buffer)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def _new_line(buffer: Buffer) -> None:
    if is_block_open(buffer.text):
        buffer.insert_text("\n")
    else:
        buffer.text = joined(buffer.text)
        buffer.cursor_position = len(buffer.text)


def _history() -> History:
    """Of all chats, readable by its owner alone; in memory where it cannot be kept."""
    path = paths.state_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """Keep what is typed during an answer out of it: it waits for the next line."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (termios.error, ValueError, OSError):
        yield  # no terminal
        return
    silent = termios.tcgetattr(descriptor)
    silent[0] &= ~termios.ICRNL  # Enter stays the key that the editor knows
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def piped_message() -> str:
    """All of standard input. Raises UsageError for what is no text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError("Standard input is not UTF-8 text.") from exc
