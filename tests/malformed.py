"""Requests that are wrong in one way or several, made from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_JSON = "application/json"
_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    10**40,
    -(2**63),
    0.5,
    "",
    "x",
    "\x00",
    "\ud800",
    "é" * 300,
    [],
    [[]],
    {},
    {"": ""},
    [None],
    {"type": "json_schema"},
    {"type": "json_object", "schema": []},
    {"type": "function", "function": {"name": "f"}},
    ["a"] * 3000,
    {str(i): i for i in range(3000)},
]
_NAMES = [
    *("messages", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "seed", "stop", "n"),
    *("dry_penalty_last_n", "xtc_probability", "xtc_threshold", "logit_bias", "grammar", "stream"),
    *("json_schema", "response_format", "stream_options", "logprobs", "top_logprobs", "tools"),
    *("tool_choice", "parallel_tool_calls", "ignore_eos", "echo", "suffix", "best_of", "user"),
    *("unknown", "messages2", "cache_prompt", "metadata"),
]
_ROLES = [*["user"] * 8, "system", "assistant", "tool", "nobody", "", 3, None]
_GRAMMARS = [
    *("root ::=", 'root ::= "a', "root ::= root", 'root ::= "a"{1,99999}', "root ::= [^]", "\x00"),
    *('rot ::= "a"', "root ::= x", 'root ::= ("a" | root)*', "root ::= (((((", 'root ::= ("a"*)*'),
    'root ::= "a"* "a"* "a"* "b"',
]
_SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/nothing"},
    {"$ref": "file:///etc/passwd"},
    {"type": "nothing"},
    {"anyOf": []},
    {"enum": []},
    {"type": "string", "pattern": "((((a*)*)*)*)*$"},
    {"type": "string", "pattern": "^[$"},
    {"type": "array", "minItems": 10, "maxItems": 2},
    {"type": "integer", "minimum": 10**30},
    {"properties": {"a": 3}},
    {"type": ["object", 3]},
]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request as it is sent."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)


def malformed(seed: int) -> Malformed:
    """The request of a seed."""
    luck = random.Random(seed)
    path = luck.choice([CHAT, CHAT, COMPLETION])
    headers = {"content-type": _JSON}
    body = _body(luck, path)
    content = json.dumps(body).encode()
    kind = luck.randrange(18)
    if kind == 0:
        content = content[: luck.randrange(len(content) + 1)]
    elif kind == 1:
        spot = luck.randrange(len(content))
        content = content[:spot] + luck.randbytes(luck.randrange(1, 9)) + content[spot:]
    elif kind == 2:
        depth = luck.choice([60, 1000, 100_000])
        content = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    elif kind == 3:
        content = luck.choice([b"", b"null", b"3", b'"x"', b"[]", b"NaN", b'{"n":1e999}', b"\xff"])
    elif kind == 4:
        odd = [
            "text/plain",
            "",
            "application/json; charset=none",
            "multipart/form-data",
            "x" * 5000,
        ]
        headers["content-type"] = luck.choice(odd)
    elif kind == 5:
        path = luck.choice(["/", "/v1", "/v1/models/%00", "/v1/models/../x", "/v2", path + "/"])
    method = luck.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD"]) if kind == 6 else "POST"
    return Malformed(method, path, content, headers)


def _body(luck: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": luck.choice([1, 2, 4])}
    if path == CHAT:
        body["messages"] = [_message(luck) for _ in range(luck.choice([0, 1, 1, 2, 3]))]
    else:
        body["prompt"] = luck.choice(
            ["x", "x", "x", "", ["a", "b"], [1, 2], [-1], [10**9], [True], 3]
        )
    for _ in range(luck.choice([0, 0, 1, 2, 3])):
        body[luck.choice(_NAMES)] = luck.choice(_VALUES)
    extra = luck.randrange(8)
    if extra == 0:
        body["grammar"] = luck.choice(_GRAMMARS)
    elif extra == 1:
        body["json_schema"] = luck.choice(_SCHEMAS)
    elif extra == 2:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": luck.choice(_SCHEMAS)},
        }
    elif extra == 3:
        function = {"name": luck.choice(["f", "", 3]), "parameters": luck.choice(_SCHEMAS)}
        body["tools"] = [{"type": "function", "function": function}] * luck.randrange(3)
        body["tool_choice"] = luck.choice(["required", "auto", "none", "x", {"function": {}}])
    return body


def _message(luck: random.Random) -> Any:
    if luck.randrange(6) == 0:
        return luck.choice(_VALUES)
    contents = [
        *["x"] * 8,
        "",
        None,
        3,
        [],
        [{"type": "text", "text": "x"}],
        [{"type": "image_url"}],
        {},
    ]
    message = {"role": luck.choice(_ROLES), "content": luck.choice(contents)}
    if luck.randrange(5) == 0:
        message["tool_calls"] = luck.choice(_VALUES)
    return message
