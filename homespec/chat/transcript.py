"""A conversation as a JSON file: the messages, the model, the settings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homespec.chat.settings import Settings
from homespec.chat.types import Message
from homespec.disk import NAMED_HINT, whole_file
from homespec.errors import UsageError

FORMAT = "homespec chat"
VERSION = 1
_KEYS = {"format", "version", "model", "system", "messages", "start", "settings"}


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is kept of a conversation; start: the first message that is still sent."""

    model: str
    system: str | None
    messages: list[Message]
    settings: Settings
    start: int = 0


def write(path: Path, transcript: Transcript) -> None:
    """Write a transcript whole or not at all, for its owner alone. Raises DiskError."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "model": transcript.model,
        "system": transcript.system,
        "messages": transcript.messages,
        "start": transcript.start,
        "settings": transcript.settings.as_dict(),
    }
    with whole_file(path, hint=NAMED_HINT) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(values, file, ensure_ascii=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> Transcript:
    """Read a transcript. Raises UsageError for a file that is none."""
    try:
        values = json.loads(path.read_text("utf-8", "surrogateescape"))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise UsageError(f"{path} is no saved chat: it holds no JSON.") from exc
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{path} is no saved chat.", hint="/save FILE writes one.")
    if values.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {values.get('version')} of the format; {VERSION} is known here.",
            hint="It may be of a newer homespec.",
        )
    unknown, missing = values.keys() - _KEYS, _KEYS - values.keys()
    if unknown or missing:
        what = f"an unknown key {min(unknown)!r}" if unknown else f"no key {min(missing)!r}"
        raise UsageError(f"{path} is no saved chat: it has {what}.")
    settings = values["settings"]
    if not isinstance(settings, dict):
        raise UsageError(f"{path} is no saved chat: its settings are no object.")
    messages = _messages(path, values["messages"])
    start, system = values["start"], values["system"]
    if not isinstance(start, int) or not 0 <= start <= len(messages):
        raise UsageError(f"{path} is no saved chat: its start is {start!r}.")
    if system is not None and not isinstance(system, str):
        raise UsageError(f"{path} is no saved chat: its system prompt is no text.")
    return Transcript(str(values["model"]), system, messages, Settings.from_dict(settings), start)


def _messages(path: Path, values: Any) -> list[Message]:
    if not isinstance(values, list):
        raise UsageError(f"{path} is no saved chat: its messages are no list.")
    for number, message in enumerate(values, 1):
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or message["role"] not in ("user", "assistant")
            or not isinstance(message["content"], str)
        ):
            raise UsageError(
                f"{path} is no saved chat: message {number} is not a role and a content."
            )
    return values
