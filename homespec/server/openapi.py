"""The server describes itself in OpenAPI 3.1: what it takes, and which statuses it gives."""

from __future__ import annotations

from typing import Any

from homespec import __version__
from homespec.api import CHAT, COMPLETION
from homespec.decoding.sampling import MAX_SEED
from homespec.server.asked import MAX_TOP_LOGPROBS
from homespec.server.settings import Limits

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_ERRORS = {
    400: "Not understood, or it cannot be done: the message says what.",
    401: "The API key is missing or wrong.",
    403: "The server is not called by this name.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not sent as application/json.",
    429: "The queue is full: Retry-After says when to come again.",
    503: "The model cannot answer now.",
}


def document(limits: Limits) -> dict[str, Any]:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "homespec", "version": __version__},
        "paths": {
            CHAT: {"post": _post(_chat(limits), "chat.completion")},
            COMPLETION: {"post": _post(_completion(limits), "text_completion")},
            "/apply-template": {"post": _asked(_chat(limits), {"prompt": _TEXT})},
            "/tokenize": {"post": _asked(_tokenize(), {"tokens": _TOKENS})},
            "/v1/models": {"get": _get("The model, in a list of one.")},
            "/v1/models/{name}": {"get": _model()},
            "/health": {"get": _get("It answers.", also=503)},
            "/v1/health": {"get": _get("It answers.", also=503)},
            "/props": {"get": _get("Settings and template of the model.")},
            "/metrics": {"get": _get("Figures for Prometheus.", kind="text/plain", schema=_TEXT)},
        },
        "components": {
            "schemas": {"Error": _error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _content(schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


def _failures(*statuses: int) -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/Error"}
    return {
        str(status): {"description": _ERRORS[status], **_content(reference)} for status in statuses
    }


def _get(
    description: str,
    *,
    also: int | None = None,
    kind: str = "application/json",
    schema: Schema | None = None,
) -> dict[str, Any]:
    answer = {"description": description, **_content(schema or {"type": "object"}, kind)}
    failures = _failures(401, 403, *([also] if also else []))
    return {"responses": {"200": answer, **failures}}


def _model() -> dict[str, Any]:
    found = _get("The model.")
    missing = {**_failures(400)["400"], "description": "There is no such model."}
    found["responses"]["404"] = missing
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {**found, "parameters": [name]}


def _post(body: Schema, kind: str) -> dict[str, Any]:
    answer = {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {"type": "array", "items": {"type": "object"}},
            "usage": {"type": "object"},
            "timings": {"type": "object"},
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }
    content = {**_content(answer)["content"], **_content(_TEXT, "text/event-stream")["content"]}
    return _taking(body, {"description": "The answer, whole or in events.", "content": content})


def _asked(body: Schema, properties: dict[str, Schema]) -> dict[str, Any]:
    answer = {"type": "object", "properties": properties, "required": [*properties]}
    return _taking(body, {"description": "The answer.", **_content(answer)})


def _taking(body: Schema, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, **_content(body)},
        "responses": {"200": answer, **_failures(*_ERRORS)},
    }


def _error() -> Schema:
    text_or_null = {"type": ["string", "null"]}
    inner = {
        "type": "object",
        "properties": {
            "message": _TEXT,
            "type": _TEXT,
            "param": text_or_null,
            "code": text_or_null,
        },
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}


def _common(limits: Limits) -> dict[str, Schema]:
    """What both endpoints take."""
    return {
        "model": _TEXT,
        "max_tokens": _COUNT,
        "temperature": {"type": "number", "minimum": 0},
        "top_k": {"type": "integer", "minimum": 0},
        "top_p": _SHARE,
        "min_p": _SHARE,
        "presence_penalty": {"type": "number"},
        "frequency_penalty": {"type": "number"},
        "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.choices},
        "stop": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "maxItems": limits.stops,
                },
            ]
        },
        "stream": {"type": "boolean"},
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": {"type": "boolean"}},
        },
        "ignore_eos": {"type": "boolean"},
        "grammar": _TEXT,
        "json_schema": {"type": "object"},
        "response_format": {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
    }


def _chat(limits: Limits) -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
    }
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool", "function"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
        },
        "required": ["role", "content"],
    }
    function = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "description": _TEXT,
            "parameters": {"type": "object"},
        },
        "required": ["name"],
    }
    tool = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    }
    own: dict[str, Schema] = {
        "messages": {
            "type": "array",
            "items": message,
            "minItems": 1,
            "maxItems": limits.messages,
        },
        "max_completion_tokens": _COUNT,
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "tools": {"type": "array", "items": tool, "maxItems": limits.tools},
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]},
        "functions": {"type": "array", "items": function, "maxItems": limits.tools},
        "function_call": {"anyOf": [{"enum": ["auto", "none"]}, {"type": "object"}]},
    }
    return _object({**_common(limits), **own}, "messages")


def _completion(limits: Limits) -> Schema:
    prompt = {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {**_TOKENS, "minItems": 1},
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1},
                "minItems": 1,
                "maxItems": limits.choices,
            },
        ]
    }
    logprobs = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
    return _object({**_common(limits), "prompt": prompt, "logprobs": logprobs}, "prompt")


def _tokenize() -> Schema:
    flag = {"type": "boolean"}
    return _object({"content": _TEXT, "add_special": flag, "parse_special": flag}, "content")


def _object(properties: dict[str, Schema], required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": [required]}
