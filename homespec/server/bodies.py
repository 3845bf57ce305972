"""The bodies of answers, whole and in events, in the OpenAI form."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from homespec.api import timings, usage
from homespec.decoding.logprobs import TokenLogprobs
from homespec.decoding.stats import GenerationStats
from homespec.llama.tokenizer import Tokenizer


@dataclass(slots=True)
class Choice:
    """A choice as it grows. calls: of tools."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Bodies:
    """Writes the bodies of one answer.

    n: choices of a prompt. told: whether log-probabilities were asked for. old: whether calls are
    those of functions, not of tools.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, chat: bool, n: int, told: bool, old: bool = False
    ) -> None:
        self._tokenizer, self._chat, self._n, self._told = tokenizer, chat, n, told
        self._model, self._old = model, old
        self._created = int(time.time())
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice], stats: Sequence[GenerationStats]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head(kind, [self._choice(one) for one in choices]),
            "usage": total_usage(stats, self._n),
            "timings": total_timings(stats),
        }

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message["content"] = choice.text or None
                message |= self._called(choice.calls)
            content: dict[str, Any] = {"message": message}
        else:
            content = {"text": choice.text}
        return {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice.index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def first(self, index: int) -> dict[str, Any]:
        """The event that opens a choice of a chat."""
        return self._event(index, {"role": "assistant", "content": ""}, (), None)

    def piece(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """An event with text."""
        return self._event(index, {"content": text} if self._chat else text, logprobs, None)

    def calls(self, index: int, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """An event with calls of tools."""
        numbered = [{"index": i, **call} for i, call in enumerate(calls)]
        return self._event(index, self._called(numbered), (), None)

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"function_call": calls[0]["function"]} if self._old else {"tool_calls": calls}

    def last(
        self, index: int, reason: str, stats: GenerationStats, *, with_usage: bool
    ) -> dict[str, Any]:
        """The event that ends a choice."""
        event = self._event(index, {} if self._chat else "", (), reason)
        event["timings"] = timings(stats)
        if not with_usage:  # it comes in an event of its own, as the API has it
            event["usage"] = usage(stats)
        return event

    def usage(self, stats: Sequence[GenerationStats]) -> dict[str, Any]:
        """The event after all choices: no choice, but what they took."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {
            **self._head(kind, []),
            "usage": total_usage(stats, self._n),
            "timings": total_timings(stats),
        }

    def _event(
        self, index: int, content: Any, logprobs: Sequence[TokenLogprobs], reason: str | None
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = {
            "index": index,
            ("delta" if self._chat else "text"): content,
            "logprobs": self._logprobs(index, logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        return self._head(kind, [choice])

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._told:
            return None
        if self._chat:
            return {"content": [self._entry(one) for one in logprobs], "refusal": None}
        offset = self._offsets.get(index, 0)
        offsets = []
        for one in logprobs:
            offsets.append(offset)
            offset += len(self._text(one.token))
        self._offsets[index] = offset
        return {
            "tokens": [self._text(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{self._text(t): p for t, p in one.best} for one in logprobs],
            "text_offset": offsets,
        }

    def _entry(self, one: TokenLogprobs) -> dict[str, Any]:
        best = [self._token(token, logprob) for token, logprob in one.best]
        return {**self._token(one.token, one.logprob), "top_logprobs": best}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": [*piece]}

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")


def total_usage(stats: Sequence[GenerationStats], n: int) -> dict[str, Any]:
    """Of all choices; a prompt counts once, however many choices it has. stats: by choice."""
    prompts = [usage(one) for one in stats[::n]]
    read = sum(one["prompt_tokens"] for one in prompts)
    written = sum(one.num_tokens for one in stats)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def total_timings(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Those of one choice; of several, counts are added up, and times are the longest."""
    found = timings(stats[0])
    for more in map(timings, stats[1:]):
        for name in ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
            found[name] += more[name]
        for name in ("prompt_ms", "predicted_ms"):
            found[name] = max(found[name], more[name])
    if len(stats) > 1 and found["predicted_ms"]:
        found["predicted_per_second"] = round(found["predicted_n"] * 1e3 / found["predicted_ms"], 3)
    return found
