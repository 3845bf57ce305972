"""Asks an OpenAI-compatible server (llama-server, Ollama, ...) the same prompts.

Two clocks are told: the client's, from the request to the last byte, and what the server says of
itself (`timings`, as llama-server sends them; `usage` counts the tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from homespec.closing import Closing
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import clock
from homespec.errors import NetworkError, UsageError

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 600.0  # a small machine reads a long prompt for minutes

_TIMINGS = {
    "prompt_per_second": "prompt_tokens_per_second",
    "predicted_per_second": "decode_tokens_per_second",
    "prompt_ms": "prompt_ms",
    "predicted_ms": "decode_ms",
    "draft_n": "num_drafted",
    "draft_n_accepted": "num_accepted",
}
"""llama-server's name -> ours."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """An answer by the client's clock, and what the server reported of it."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    first_token_seconds: float
    reported: dict[str, float]

    def figures(self) -> dict[str, Any]:
        """Fields of a Run."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "reported": self.reported,
        }


class Peer(Closing):
    """A server. Close it, or use it in a `with` block."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        """url: up to and with /v1. model: None for the only one, or the first, that it lists.

        Raises UsageError for what is no URL, NetworkError where nobody answers there.
        """
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"{url!r} is no address of a server.", hint="Write http://127.0.0.1:8080/v1."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        # A proxy of the environment's is for the world outside, not for a server at home.
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        self._extras = True
        try:
            self.model = model or self._first_model()
        except BaseException:
            self.close()
            raise

    def _first_model(self) -> str:
        with _explained(self.url):
            answer = self._client.get(f"{self.url}/models")
            answer.raise_for_status()
            listed = answer.json()["data"]
            return str(listed[0]["id"])

    def answer(
        self, messages: Sequence[dict[str, str]], sampling: SamplingParams, max_tokens: int
    ) -> PeerAnswer:
        """Ask, and read the stream. Raises NetworkError."""
        with _explained(self.url):
            try:
                return self._ask(self._request(messages, sampling, max_tokens))
            except httpx.HTTPStatusError as exc:
                if not self._extras or exc.response.status_code not in (400, 422):
                    raise
            self._extras = False  # a server that knows no more than OpenAI's own fields
            return self._ask(self._request(messages, sampling, max_tokens))

    def _request(
        self, messages: Sequence[dict[str, str]], sampling: SamplingParams, max_tokens: int
    ) -> dict[str, Any]:
        request = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._extras:  # empty caches and full length, as for the engine's own arms
            request |= {
                "ignore_eos": True,
                "cache_prompt": False,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
            }
        return request

    def _ask(self, request: dict[str, Any]) -> PeerAnswer:
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        first = None
        began = clock()
        with self._client.stream("POST", f"{self.url}/chat/completions", json=request) as response:
            response.raise_for_status()
            for event in _events(response):
                usage = event.get("usage") or usage
                timings = event.get("timings") or timings
                text = _text(event)
                if text and first is None:
                    first = clock() - began
                pieces.append(text)
        seconds = clock() - began
        num_tokens = int(usage.get("completion_tokens") or sum(1 for piece in pieces if piece))
        if first is None or num_tokens < 1:
            raise NetworkError(f"The server at {self.url} sent an empty answer.")
        reported = {
            ours: float(timings[name]) for name, ours in _TIMINGS.items() if name in timings
        }
        return PeerAnswer(
            "".join(pieces),
            int(usage.get("prompt_tokens") or 0),
            num_tokens,
            seconds,
            first,
            reported,
        )

    def close(self) -> None:
        """Hang up."""
        self._client.close()


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(str(event["error"]))
        yield event


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the answer; reasoning counts, it is generated too."""
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        return str(delta.get("content") or delta.get("reasoning_content") or "")
    return ""


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Failures in plain sentences."""
    try:
        yield
    except httpx.HTTPStatusError as exc:
        raise NetworkError(
            f"The server at {url} answered {exc.response.status_code} "
            f"({exc.response.reason_phrase}).",
            hint="Name its address up to and with /v1, and its model where it has several.",
        ) from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise NetworkError(
            f"The server at {url} cannot be reached: {exc}.", hint="Is it running there?"
        ) from exc
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise NetworkError(
            f"What the server at {url} sent is no answer of an OpenAI-compatible server.",
            hint="Name its address up to and with /v1.",
        ) from exc
