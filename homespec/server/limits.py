"""Reading a request's body: bounded in size and depth, and JSON as the standard has it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from homespec.server.errors import ApiError
from homespec.server.leaving import Gone
from homespec.server.settings import Limits


async def read_body(request: Request, limits: Limits) -> dict[str, Any]:
    """The object that was sent, within some time. Raises ApiError."""
    try:
        body = await asyncio.wait_for(_bytes(request, limits), limits.body_seconds)
    except asyncio.TimeoutError as exc:
        raise ApiError(408, "The body did not come in time.", code="timeout") from exc
    except ClientDisconnect as exc:
        raise Gone from exc
    return parse(body, limits)


async def _bytes(request: Request, limits: Limits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send other types to any address without asking: it may not send this one.
        raise ApiError(415, "The Content-Type must be application/json.", code="content_type")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413,
        f"The request is larger than {limits.body_bytes} bytes.",
        code="request_too_large",
        hint="--max-request-mib of homespec serve allows more.",
    )


def parse(body: bytes, limits: Limits) -> dict[str, Any]:
    """The object in a body. Raises ApiError for what is none, or is nested too deep."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except RecursionError as exc:
        raise _too_deep(limits) from exc
    except ValueError as exc:  # bad UTF-8 is one, too
        raise ApiError(400, "The body is no JSON.", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    _check(value, limits)
    messages = value.get("messages")
    if isinstance(messages, list) and len(messages) > limits.messages:
        raise ApiError(
            400, f"{len(messages)} messages are more than {limits.messages}.", param="messages"
        )
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _check(value: Any, limits: Limits) -> None:
    """Depth, numbers that are none, and text that no encoding can write."""
    level = [value]
    for _ in range(limits.json_depth):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str):
                _check_text(one)
            elif isinstance(one, float) and not math.isfinite(one):
                raise ApiError(400, "A number is too large.", code="invalid_json")
        if not below:
            return
        level = below
    raise _too_deep(limits)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ApiError(400, "A text has half a surrogate pair.", code="invalid_json") from exc


def _too_deep(limits: Limits) -> ApiError:
    return ApiError(
        400, f"The body is nested deeper than {limits.json_depth} levels.", code="invalid_json"
    )
