"""The OpenAI form of requests and answers, as batch files and the server speak it.

A body is read strictly: what would change the answer and is not understood is an error, what only
labels a request is passed over. llama-server's own sampling names are taken too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import GenerationStats
from homespec.errors import UsageError
from homespec.generation import GenerateParams, Result
from homespec.llama.sampler import json_schema_grammar
from homespec.loading import Prompt

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ENDPOINTS = (CHAT, COMPLETION)

_LABELS = frozenset(
    ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
# Asked for by many clients with values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "cache_prompt": (True, False),
}
_NUMBERS = frozenset(
    name
    for name, default in (
        (name, SamplingParams.__dataclass_fields__[name].default)
        for name in SamplingParams.__dataclass_fields__
    )
    if isinstance(default, float)
)
_COUNTS = frozenset(("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "seed"))


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a body says nothing. system: a system prompt before the messages."""

    sampling: SamplingParams
    params: GenerateParams
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it was read. seed of `sampling`: None where the body names none."""

    prompt: Prompt
    sampling: SamplingParams
    params: GenerateParams
    system: str | None
    chat: bool


def read_call(url: str, body: Mapping[str, Any], defaults: Defaults) -> Call:
    """The request that a body of this endpoint asks for. Raises UsageError."""
    if url not in ENDPOINTS:
        raise UsageError(f"The url is {url!r}.", hint=f"Known: {' and '.join(ENDPOINTS)}.")
    left = {key: value for key, value in body.items() if value is not None and key not in _LABELS}
    chat = url == CHAT
    prompt = _messages(left.pop("messages", None)) if chat else _prompt(left.pop("prompt", None))
    changes: dict[str, Any] = {}
    for name in (_NUMBERS | _COUNTS) & left.keys():
        changes[name] = _number(name, left.pop(name), whole=name in _COUNTS)
    if changes.get("seed", 0) < 0:
        del changes["seed"]
    if "logit_bias" in left:
        changes["logit_bias"] = _bias(left.pop("logit_bias"))
    grammar = _grammar(left)
    if grammar is not None:
        changes["grammar"] = grammar
    params = replace(defaults.params, raw=not chat, **_limits(left))
    for name, neutral in _NEUTRAL.items():
        if name in left and (left.pop(name) not in neutral and neutral):
            raise UsageError(f"{name} is not supported here.", hint="Leave it out.")
    if left:
        raise UsageError(f"The body has an unknown key {min(left)!r}.")
    # A default seed is not the body's: it is mixed with what names the request.
    sampling = replace(defaults.sampling, **{"seed": None, **changes})
    return Call(prompt, sampling, params, defaults.system if chat else None, chat)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError("A chat needs `messages`, a list with at least one of them.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError("A message is an object with a `role` and a `content`.")
    return [{**message, "content": _content(message.get("content"))} for message in value]


def _content(value: Any) -> str:
    """Text, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        found = [part.get("text") for part in value if isinstance(part, dict)]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) == len(value):
            return "".join(texts)
    raise UsageError("The content of a message must be text.")


def _prompt(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise UsageError("A completion needs a `prompt`: one text, or a list of token ids.")


def _number(name: str, value: Any, *, whole: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.")
    if not whole and abs(value) > sys.float_info.max:
        raise UsageError(f"{name} is too large a number.")
    return value


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(
            (int(token), float("-inf") if bias is False else float(bias))
            for token, bias in dict(value).items()
        )
    except (TypeError, ValueError, OverflowError) as exc:
        raise UsageError("logit_bias must map token ids to numbers.") from exc


def _grammar(left: dict[str, Any]) -> str | None:
    grammar, schema = left.pop("grammar", None), left.pop("json_schema", None)
    wanted = _wanted_schema(left.pop("response_format", None))
    given = [value for value in (grammar, schema, wanted) if value is not None]
    if len(given) > 1:
        raise UsageError("One grammar or schema is enough.", hint="Leave the others out.")
    if grammar is None:
        return json_schema_grammar(given[0]) if given else None
    if not isinstance(grammar, str):
        raise UsageError("grammar must be a text in GBNF.")
    return grammar


def _wanted_schema(value: Any) -> Any:
    """The schema of a response_format; None for free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return value.get("schema") or {"type": "object"}
    named = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return named["schema"]
    raise UsageError(
        "response_format cannot be used.",
        hint='It is {"type": "text"}, "json_object", or "json_schema" with a json_schema.schema.',
    )


def _limits(left: dict[str, Any]) -> dict[str, Any]:
    """The fields of GenerateParams that a body sets."""
    changes: dict[str, Any] = {}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in left:
            changes["max_tokens"] = _number(name, left.pop(name), whole=True)
    if "stop" in left:
        stop = left.pop("stop")
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise UsageError("stop must be a text or a list of texts.")
        changes["stop"] = tuple(stops)
    if "ignore_eos" in left:
        changes["ignore_eos"] = bool(left.pop("ignore_eos"))
    return changes


def answer_body(result: Result, *, id_: str, model: str, chat: bool) -> dict[str, Any]:
    """The body of an answer, with usage and llama-server's timings."""
    reason = result.finish_reason.value
    if chat:
        content: dict[str, Any] = {"message": {"role": "assistant", "content": result.text}}
    else:
        content = {"text": result.text}
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + id_,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}],
        "usage": usage(result.stats),
        "timings": timings(result.stats),
    }


def usage(stats: GenerationStats) -> dict[str, Any]:
    """Tokens read and written."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
    }


def timings(stats: GenerationStats) -> dict[str, Any]:
    """As llama-server names them; milliseconds of the clock, shared passes counted in full."""
    prompt = stats.num_prompt_tokens - stats.num_cached_tokens
    return {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": round(stats.time_to_first_token_seconds * 1e3, 3),
        "predicted_n": stats.num_tokens,
        "predicted_ms": round(stats.decode_seconds * 1e3, 3),
        "predicted_per_second": round(stats.decode_tokens_per_second, 3),
        "draft_n": stats.num_drafted,
        "draft_n_accepted": stats.num_accepted,
    }
