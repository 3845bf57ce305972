"""A line of the input, read: the OpenAI batch form, `{"prompt"}`, `{"messages"}`, or plain text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from homespec.api import CHAT, COMPLETION
from homespec.errors import UsageError

MAX_LINE_BYTES = 16 << 20
_ENVELOPE = frozenset(("custom_id", "method", "url", "body"))


@dataclass(frozen=True, slots=True)
class Row:
    """A request. line: from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]

    def key(self, settings: str) -> str:
        """A hash of what the answer depends on: body, and the digest of model and settings."""
        text = json.dumps([self.url, self.body, settings], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no request, and why. raw: what of it goes into the key."""

    line: int
    custom_id: str
    error: UsageError
    raw: bytes

    def key(self, settings: str) -> str:
        """A hash of the line."""
        return hashlib.sha256(self.raw + settings.encode()).hexdigest()[:32]


def custom_id_of(line: bytes, number: int) -> str:
    """The row's name: its custom_id, else that of its line, `line-12`."""
    if line.lstrip().startswith(b"{"):
        try:
            named = json.loads(line).get("custom_id")
        except (ValueError, RecursionError):
            named = None
        if isinstance(named, str):
            return named
    return line_name(number)


def line_name(number: int) -> str:
    """The name of a row that has none."""
    return f"line-{number}"


def read_row(line: bytes, number: int, *, raw: bool = False) -> Row | BadRow:
    """The request of a line. raw: a bare prompt is continued, not asked in a chat."""
    custom_id = line_name(number)
    try:
        text = _text(line)
        if not text.startswith("{"):
            return _prompt_row(number, custom_id, text, {}, raw)
        fields = _object(text)
        custom_id = _name(fields.pop("custom_id", custom_id))
        return _row(number, custom_id, fields, raw)
    except UsageError as exc:
        return BadRow(number, custom_id, exc, line)


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.")
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as exc:
        raise UsageError(f"The line is not UTF-8 text: {exc.reason}.") from exc


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"custom_id must be a text, not {value!r}.")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(
            f"The line is no JSON: {exc}.", hint="A line of plain text must not begin with {."
        ) from exc
    if not isinstance(fields, dict):
        raise UsageError("The line is no JSON object.")
    return fields


def _row(number: int, custom_id: str, fields: dict[str, Any], raw: bool) -> Row:
    if "body" in fields:
        url, body = fields.get("url"), fields["body"]
        unknown = fields.keys() - _ENVELOPE
        if unknown:
            raise UsageError(f"The row has an unknown key {min(unknown)!r}.")
        if not isinstance(body, dict) or not isinstance(url, str):
            raise UsageError("A row needs a `url` and a `body` that is an object.")
        if fields.get("method", "POST") != "POST":
            raise UsageError("The method of a row must be POST.")
        return Row(number, custom_id, url, body)
    if "messages" in fields:
        return Row(number, custom_id, CHAT, fields)
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str):
        raise UsageError(
            "The row has neither `body` nor `messages` nor a `prompt` that is text.",
            hint='The least is {"prompt": "..."}.',
        )
    return _prompt_row(number, custom_id, prompt, fields, raw)


def _prompt_row(number: int, custom_id: str, prompt: str, fields: dict[str, Any], raw: bool) -> Row:
    if raw:
        return Row(number, custom_id, COMPLETION, {**fields, "prompt": prompt})
    messages = [{"role": "user", "content": prompt}]
    return Row(number, custom_id, CHAT, {**fields, "messages": messages})
