"""What a chat shows: answers while they come, the status line, notices."""

from __future__ import annotations

import base64
import os
import sys
import time
from typing import Protocol

from rich.text import Text

from homespec.chat.settings import Settings
from homespec.chat.types import Answer, Figures, Piece
from homespec.cli.chat_markdown import MarkdownStream
from homespec.console import plain_console, printable, stderr

_CLIPBOARD_BYTES = 74_994  # xterm and others take no more in one sequence


class View(Protocol):
    """Shows one answer after the other."""

    def begin(self, settings: Settings) -> None:
        """An answer is being made."""
        ...

    def write(self, piece: Piece) -> None:
        """A piece of it."""
        ...

    def end(self) -> None:
        """It is over, or was stopped."""
        ...

    def status(self, answer: Answer, n_ctx: int) -> None:
        """The line after an answer."""
        ...

    def say(self, *lines: str) -> None:
        """Lines of a command, or a notice."""
        ...

    def copy(self, text: str) -> None:
        """Put a text into the clipboard."""
        ...


class PipeView:
    """Bare text: answers to stdout, as they are into a pipe; everything else to stderr."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = "\n"

    def begin(self, settings: Settings) -> None:
        """Nothing is shown before the answer."""
        self._fold, self._reasoning = settings.fold, False

    def write(self, piece: Piece) -> None:
        """Text, without colours."""
        if piece.reasoning and self._fold:
            return
        if self._reasoning and not piece.reasoning:
            self._out("\n\n")
        self._reasoning = piece.reasoning
        self._out(printable(piece.text) if self._terminal else piece.text)

    def _out(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        """End the line."""
        if self._last != "\n":
            self._out("\n")

    def status(self, answer: Answer, n_ctx: int) -> None:
        """Only people read it."""
        if self._terminal:
            self.say(status_line(answer.figures, n_ctx))

    def say(self, *lines: str) -> None:
        """On stderr."""
        for line in lines:
            print(printable(line), file=sys.stderr)

    def copy(self, text: str) -> None:
        """There is no terminal to ask."""
        self.say("This terminal has no clipboard that can be reached.")


class TerminalView:
    """A terminal that knows colours or at least cursor movements."""

    def __init__(self, *, show_accepted: bool = False, markdown: bool = True) -> None:
        """show_accepted: tint the tokens that were drafted; Markdown is not rendered then."""
        self._console = plain_console(soft_wrap=True)
        self._tint = show_accepted
        self._markdown = None if show_accepted or not markdown else MarkdownStream(self._console)
        self._waiting = False

    def begin(self, settings: Settings) -> None:
        """A sign that something is being done, until the first piece."""
        self._fold, self._began = settings.fold, time.monotonic()
        self._reasoning, self._line_open, self._folded = False, False, False
        self._console.print(Text("…", "dim"), end="")
        self._waiting = True

    def _clear_sign(self) -> None:
        if self._waiting:
            self._waiting = False
            self._console.file.write("\r\x1b[K")
            self._console.file.flush()

    def write(self, piece: Piece) -> None:
        """Reasoning dim, the answer as Markdown."""
        self._clear_sign()
        if piece.reasoning:
            self._reason(piece)
            return
        self._end_reasoning()
        text = printable(piece.text)
        if self._markdown is not None:
            self._markdown.push(text)
        else:
            self._raw(text, "green" if piece.accepted and self._tint else "")

    def _reason(self, piece: Piece) -> None:
        self._reasoning = True
        if not self._fold:
            style = "dim green" if piece.accepted and self._tint else "dim"
            self._raw(printable(piece.text), style)
        elif not self._folded:
            self._folded = True
            self._raw("Thinking … ", "dim")

    def _end_reasoning(self) -> None:
        if not self._reasoning:
            return
        self._reasoning = False
        if self._folded:
            self._raw(f"{time.monotonic() - self._began:.1f} s (/fold off shows it)", "dim")
        self._raw("\n\n")
        self._line_open = False

    def _raw(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="")
        self._line_open = not text.endswith("\n") if text else self._line_open

    def end(self) -> None:
        """Close the block and the line; an empty one sets off what follows."""
        self._clear_sign()
        if self._markdown is not None:
            self._markdown.end()
        if self._line_open:
            self._console.print()
        self._console.print()

    def status(self, answer: Answer, n_ctx: int) -> None:
        """Dim, under the answer."""
        self._console.print(Text(status_line(answer.figures, n_ctx), "dim"), soft_wrap=False)

    def say(self, *lines: str) -> None:
        """In the terminal's own colours, broken between words."""
        for line in lines:
            self._console.print(Text(printable(line)), soft_wrap=False)

    def copy(self, text: str) -> None:
        """Ask the terminal itself (OSC 52): that reaches the user's clipboard over ssh, too."""
        data = base64.b64encode(text.encode("utf-8", "replace")).decode()
        if len(data) > _CLIPBOARD_BYTES:
            self.say("The text is too long for the terminal's clipboard; /save FILE keeps it.")
            return
        self._console.file.write(f"\x1b]52;c;{data}\x07")
        self._console.file.flush()
        self.say(f"The terminal was asked to copy {len(text):,} characters.")


def status_line(figures: Figures, n_ctx: int) -> str:
    """Speed, what drafting gained, and how full the context is."""
    parts = [f"{figures.tokens_per_second:.1f} tok/s"]
    if figures.speedup is not None:
        parts.append(f"{figures.speedup:.2f}x plain (estimated)")
    if figures.num_drafted:
        parts.append(f"{figures.num_accepted / figures.num_drafted:.0%} of drafts accepted")
    used = figures.num_prompt_tokens + figures.num_tokens
    parts.append(f"context {used:,} of {n_ctx:,}")
    return " · ".join(parts)


def is_plain_terminal() -> bool:
    """Whether the terminal, if it is one, can do no more than print."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return dumb or not (sys.stdin.isatty() and sys.stdout.isatty())


def complain(message: str, hint: str | None) -> None:
    """A command or a message that was refused; the chat goes on."""
    console = stderr()
    console.print(Text(printable(message), "red"), soft_wrap=False)
    if hint:
        console.print(Text(printable(hint), "dim"), soft_wrap=False)
