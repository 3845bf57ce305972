"""A server as a chat needs it: `homespec serve`, llama-server, or another with the OpenAI API."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from homespec.chat.settings import Settings
from homespec.chat.types import Answer, Figures, Message, Piece, Reading
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import clock
from homespec.decoding.types import FinishReason
from homespec.errors import NetworkError, UsageError

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 600.0  # a small machine reads a long prompt for minutes
_CHARACTERS = 3  # of a token, where a server does not count them
_UNKNOWN_CONTEXT = 1 << 20


class RemoteEngine:
    """Keeps the ChatEngine protocol. Close it in the end."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: up to and with /v1. Raises UsageError, and NetworkError where nobody answers."""
        root = url.rstrip("/").removesuffix("/v1")
        if not root.startswith(("http://", "https://")):
            raise UsageError(
                f"{url!r} is no address of a server.", hint="Write http://127.0.0.1:8080/v1."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        # A proxy of the environment's is for the world outside, not for a server at home.
        self._client = httpx.Client(
            base_url=root, headers=headers, timeout=timeout, trust_env=False
        )
        # Answers have connections of their own, which `abort` closes.
        self._answers = httpx.Client(
            base_url=root,
            headers=headers,
            timeout=timeout,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._root = root
        self._socket: socket.socket | None = None
        self.aborted = False
        try:
            self.name = str(self._ask("GET", "/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as exc:
            self.close()
            raise NetworkError(f"{root} lists no model.") from exc
        except BaseException:
            self.close()
            raise
        self.n_ctx = self._context()
        self._counts = True

    def _context(self) -> int:
        """Tokens that a conversation may have, where the server tells them."""
        try:
            return int(self._ask("GET", "/props")["default_generation_settings"]["n_ctx"])
        except (NetworkError, UsageError, LookupError, TypeError, ValueError):
            return _UNKNOWN_CONTEXT

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
            _check(response)
            return response.json()
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        except ValueError as exc:
            raise NetworkError(f"{self._root} does not speak the OpenAI API.") from exc

    def _unreachable(self, exc: Exception) -> NetworkError:
        return NetworkError(
            f"{self._root} does not answer: {exc or type(exc).__name__}.",
            hint="Is the server running? homespec serve starts one.",
        )

    def measure(self, messages: Sequence[Message], settings: Settings) -> Reading:
        """What the messages come to as a prompt: by the server's count, or roughly."""
        if self._counts:
            try:
                prompt = self._ask("POST", "/apply-template", {"messages": list(messages)})
                body = {"content": prompt["prompt"], "add_special": True, "parse_special": True}
                num_tokens = len(self._ask("POST", "/tokenize", body)["tokens"])
                if self.n_ctx == _UNKNOWN_CONTEXT:  # it is loaded now
                    self.n_ctx = self._context()
                return Reading(num_tokens)
            except NetworkError:
                pass  # now, but perhaps not with the next message
            except (UsageError, LookupError, TypeError):
                self._counts = False
        length = sum(len(message["content"]) for message in messages)
        return Reading(length // _CHARACTERS + 8 * len(messages))

    def answer(self, messages: Sequence[Message], settings: Settings) -> RemoteAnswering:
        """Start an answer."""
        self.aborted = False
        sampling, generate = settings.sampling, settings.generate
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **_changed(sampling),
        }
        if generate.max_tokens is not None:
            body["max_tokens"] = generate.max_tokens
        if generate.stop:
            body["stop"] = list(generate.stop)
        return RemoteAnswering(self, body)

    def events(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of an answer. Raises KeyboardInterrupt after `abort`, and NetworkError."""
        try:
            with self._answers.stream(
                "POST", "/v1/chat/completions", json=body, extensions={"trace": self._connected}
            ) as response:
                if response.status_code != 200:
                    response.read()
                _check(response)
                for line in response.iter_lines():
                    if self.aborted:
                        break
                    if line.startswith("data: {"):
                        yield json.loads(line[6:])
        except (httpx.HTTPError, ValueError) as exc:
            if not self.aborted:
                raise self._unreachable(exc) from exc
        finally:
            self._socket = None
        if self.aborted:
            raise KeyboardInterrupt

    def _connected(self, event: str, info: dict[str, Any]) -> None:
        """Note the connection of an answer: it may be long before there is a response."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            connection = info["return_value"].get_extra_info("socket")
            self._socket = connection if isinstance(connection, socket.socket) else None
            if self.aborted:
                self._shut_down()

    def describe(self) -> list[tuple[str, str]]:
        """Server and model."""
        return [("server", self._root), ("model", self.name)]

    def abort(self) -> None:
        """End the answer under way; may be called by any thread."""
        self.aborted = True
        self._shut_down()

    def _shut_down(self) -> None:
        connection = self._socket
        if connection is not None:
            with suppress(OSError):  # whoever reads from it wakes up
                connection.shutdown(socket.SHUT_RDWR)

    def save(self, folder: Path) -> None:
        """The server keeps what it has read."""

    def load(self, folder: Path) -> str:
        """And finds it again."""
        return ""

    def close(self) -> None:
        """Close the connection; once is enough, twice does no harm."""
        self._client.close()
        self._answers.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteAnswering:
    """An answer that comes in events."""

    def __init__(self, engine: RemoteEngine, body: dict[str, Any]) -> None:
        self._began = clock()
        self._first = 0.0
        self._text = ""
        self._reason = FinishReason.CANCELLED
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._events = engine.events(body)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they come."""
        for event in self._events:
            if "error" in event:
                raise NetworkError(f"The server says: {event['error'].get('message')}")
            self._usage = event.get("usage") or self._usage
            self._timings = event.get("timings") or self._timings
            for choice in event.get("choices") or []:
                text = choice.get("delta", {}).get("content")
                if text:
                    self._first = self._first or clock() - self._began
                    self._text += text
                    yield Piece(text)
                if choice.get("finish_reason"):
                    length = choice["finish_reason"] == "length"
                    self._reason = FinishReason.LENGTH if length else FinishReason.STOP

    def end(self) -> Answer:
        """What came; an answer that is not finished is stopped."""
        self._events.close()
        usage, timings = self._usage, self._timings
        seconds = clock() - self._began - self._first
        num_tokens = int(usage.get("completion_tokens", 0))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        rate = timings.get("predicted_per_second") or (num_tokens / seconds if seconds else 0.0)
        figures = Figures(
            num_prompt_tokens=int(usage.get("prompt_tokens", 0)),
            num_cached_tokens=int(cached or 0),
            num_tokens=num_tokens,
            first_token_seconds=self._first,
            tokens_per_second=float(rate),
            num_drafted=int(timings.get("draft_n", 0)),
            num_accepted=int(timings.get("draft_n_accepted", 0)),
        )
        return Answer(self._text, self._reason, figures)


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    """What was set; the server has defaults of its own for the rest."""
    fields = {field.name: field.default for field in dataclasses.fields(sampling)}
    changed = {name: getattr(sampling, name) for name in fields}
    changed = {name: value for name, value in changed.items() if value != fields[name]}
    if "logit_bias" in changed:
        changed["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return changed


def _check(response: httpx.Response) -> None:
    """Raises UsageError with the server's own words, NetworkError where it cannot serve now."""
    if response.is_success:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status_code}"
    if response.status_code == 503:
        raise NetworkError(f"The server cannot answer now: {message}")
    hint = "Give the key with --api-key." if response.status_code == 401 else None
    raise UsageError(f"The server refuses: {message}", hint=hint)
