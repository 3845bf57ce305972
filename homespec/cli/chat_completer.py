"""Tab in a chat: commands, what may follow them, and paths."""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from homespec.chat.commands import ALIASES, COMMANDS
from homespec.chat.settings import PARAMETERS


class SlashCompleter(Completer):
    """Completes a line that begins with a slash."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """What the text before the cursor may become."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word, space, rest = text.partition(" ")
        if not space:
            yield from _matching([*COMMANDS, *ALIASES], word)
            return
        command = COMMANDS.get(ALIASES.get(word, word))
        if command is None:
            return
        if "FILE" in command.choices:
            inner = Document(rest, len(rest))
            yield from self._paths.get_completions(inner, complete_event)
        elif word == "/set" and rest.startswith("parameter "):
            yield from _matching(PARAMETERS, rest.partition(" ")[2])
        else:
            yield from _matching(command.choices, rest)


def _matching(words: Iterable[str], begun: str) -> Iterable[Completion]:
    for word in words:
        if word.startswith(begun):
            yield Completion(word, -len(begun))
