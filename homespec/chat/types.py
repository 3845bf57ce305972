"""What a chat needs of an engine, here or behind a server, and the values that pass between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from homespec.chat.settings import Settings
from homespec.decoding.types import FinishReason

Message = dict[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. accepted: its token was drafted; reasoning: it lies in `<think>`."""

    text: str
    accepted: bool = False
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What a conversation comes to as a prompt.

    notice: what had to be changed for the model's template to take it, with the template's words.
    opens_reasoning: the tag with which the prompt itself begins the answer's reasoning, or "".
    """

    num_tokens: int
    notice: str = ""
    opens_reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """What an answer took. Durations in seconds; speedup: against plain decoding, as estimated."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt: not read anew
    num_tokens: int
    first_token_seconds: float
    tokens_per_second: float
    num_drafted: int = 0
    num_accepted: int = 0
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer, or as much as came before it was stopped."""

    text: str
    finish_reason: FinishReason
    figures: Figures
    explanation: tuple[str, ...] = ()


class Answering(Protocol):
    """An answer under way: iterate for its pieces; `end` stops it where it is."""

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they come."""
        ...

    def end(self) -> Answer:
        """What came; an answer that is not finished is stopped."""
        ...


class ChatEngine(Protocol):
    """A model that answers messages. It keeps what it has read, so that a turn pays for its own."""

    name: str
    n_ctx: int

    def measure(self, messages: Sequence[Message], settings: Settings) -> Reading:
        """Render the messages. Raises RefusedError where the template cannot take them."""
        ...

    def answer(self, messages: Sequence[Message], settings: Settings) -> Answering:
        """Start an answer; nothing is read before it is iterated."""
        ...

    def describe(self) -> list[tuple[str, str]]:
        """Facts for a person: what, and its value."""
        ...

    def abort(self) -> None:
        """End a pass under way; may be called by any thread."""
        ...

    def save(self, folder: Path) -> None:
        """Keep what was read on disk. Raises DiskError."""
        ...

    def load(self, folder: Path) -> str:
        """Take up what was kept; "" or a sentence that says why it must be read anew."""
        ...
