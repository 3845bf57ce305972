"""Messages through the model's chat template, and what is done where the template refuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from homespec.chat.reasoning import TAGS
from homespec.chat.types import Message
from homespec.errors import RefusedError

Render = Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text; `notice` tells what had to be changed, and why."""

    text: str
    notice: str = ""

    @property
    def opens_reasoning(self) -> str:
        """The tag with which the prompt itself begins the answer's reasoning, or ""."""
        end = self.text.rstrip()
        return next((tag for tag in TAGS if end.endswith(tag)), "")


def render(messages: Sequence[Message], template: Render) -> Rendered:
    """The prompt, as the template has it, or after the least change that it takes.

    A system prompt the template refuses or leaves out goes before the first message; messages of
    one role in a row become one. Raises RefusedError with the template's own words otherwise.
    """
    given = list(messages)
    refusal: RefusedError | None = None
    text = ""
    try:
        text = template(given)
    except RefusedError as exc:
        refusal, words = exc, str(exc.__cause__ or exc.message)
        said = f"The model's chat template says: {words.rstrip('.')}."
    else:
        system = given[0]["content"].strip() if given and given[0]["role"] == "system" else ""
        if not system or system in text:
            return Rendered(text)
        said = "The model's chat template leaves the system prompt out."
    for changed, done in _changes(given):
        try:
            return Rendered(template(changed), f"{said} {done}")
        except RefusedError:
            continue
    if refusal is not None:
        raise refusal
    return Rendered(text, said)


def _changes(messages: list[Message]) -> list[tuple[list[Message], str]]:
    """What may be tried, the smallest change first, each with its sentence."""
    changes = []
    joined = _joined(messages)
    if joined != messages:
        changes.append((joined, "Messages of one role in a row were joined."))
    merged = _system_first(messages)
    if merged is not None:
        moved = "The system prompt was put before the first message instead"
        changes.append((merged, f"{moved}."))
        if _joined(merged) != merged:
            changes.append((_joined(merged), f"{moved}, and messages in a row were joined."))
    return changes


def _joined(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            content = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
    return joined


def _system_first(messages: list[Message]) -> list[Message] | None:
    """The system prompt as the beginning of the user's first message."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{**messages[1], "content": content}, *messages[2:]]
