"""The routes of the server, and what every request passes on its way to them."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from homespec import __version__
from homespec.api import CHAT, COMPLETION, Defaults
from homespec.errors import HomespecError
from homespec.server import host as states
from homespec.server.answering import Answering
from homespec.server.asked import read_asked, rendered
from homespec.server.errors import ApiError, error_response, unavailable
from homespec.server.host import Host, in_thread
from homespec.server.keys import Keys
from homespec.server.leaving import Gone
from homespec.server.limits import read_body
from homespec.server.metrics import CONTENT_TYPE, Metrics
from homespec.server.openapi import document
from homespec.server.residency import Residency
from homespec.server.settings import ServerParams

logger = logging.getLogger("homespec.server")

HEALTH = "/health"
_OPEN = frozenset((HEALTH, "/v1/health"))  # what needs no key


class Server:
    """The endpoints over a host. `app` is the ASGI application."""

    def __init__(
        self, host: Host, defaults: Defaults, params: ServerParams, keys: Keys, created: int
    ) -> None:
        """created: when the model's file was written, in seconds of the epoch."""
        self.host, self.params, self.created = host, params, created
        self.metrics = Metrics(host)
        self.answering = Answering(host, defaults, params, self.metrics)
        self.residency = Residency(host, params)
        routes = [
            Route(HEALTH, self._health),
            Route("/v1/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/metrics", self._metrics),
            Route("/props", self._props),
            Route("/openapi.json", self._openapi),
            Route("/apply-template", self._apply_template, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route(CHAT, self._post(CHAT), methods=["POST"]),
            Route(COMPLETION, self._post(COMPLETION), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            HomespecError: _told,
            HTTPException: _http,
            Gone: _nobody,
            Exception: _unexpected,
        }
        application = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        self.app: ASGIApp = Gate(application, keys, params.hosts)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> Any:
        async with self.residency.watch():
            yield
        await self.host.close()

    def _post(self, url: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await self.answering.answer(url, request)

        return endpoint

    async def _health(self, _: Request) -> Response:
        """200 while requests are answered, be it after a reload; 503 while they are not."""
        host = self.host
        if host.state == states.LOADING and not host.was_loaded:
            return error_response(unavailable("The model is being loaded.", retry_after=2))
        if host.state == states.FAILED:
            return error_response(unavailable("The model could not be loaded."))
        return JSONResponse({"status": "ok", "model": host.state, **self.residency.told()})

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.params.name or self.host.name

    def _entry(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "homespec",
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.name:
            raise ApiError(404, f"There is no model {name!r}.", code="model_not_found")
        return JSONResponse(self._entry())

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _props(self, _: Request) -> Response:
        resident = self.host.resident
        found: dict[str, Any] = {
            "model_alias": self.name,
            "build_info": f"homespec {__version__}",
            "state": self.host.state,
        }
        if resident is not None:
            engine = resident.engine
            found |= {
                "total_slots": engine.parallel,
                "default_generation_settings": {"n_ctx": engine.row_ctx},
                "chat_template": resident.template.source if resident.template else None,
                "model_path": engine.model.path.name,
                "draft_loaded": engine.draft_context is not None,
                "cells": engine.cache.num_cells,
            }
        return JSONResponse(found)

    async def _apply_template(self, request: Request) -> Response:
        """The prompt that messages make, as llama-server gives it."""
        body = await read_body(request, self.params.limits)
        defaults, limits = self.answering.defaults, self.params.limits
        asked = await in_thread(lambda: read_asked(CHAT, body, defaults, limits))
        async with self.host.use() as resident:
            return JSONResponse(
                {"prompt": await in_thread(lambda: rendered(resident.template, asked))}
            )

    async def _tokenize(self, request: Request) -> Response:
        """The tokens of a text, as llama-server gives them."""
        body = await read_body(request, self.params.limits)
        text = body.get("content")
        special, parse = body.get("add_special", False), body.get("parse_special", True)
        if not isinstance(text, str):
            raise ApiError(400, "content must be a text.")
        if not isinstance(special, bool) or not isinstance(parse, bool):
            raise ApiError(400, "add_special and parse_special must be true or false.")
        async with self.host.use() as resident:
            encode = resident.engine.tokenizer.encode
            tokens = await in_thread(lambda: encode(text, add_special=special, parse_special=parse))
        return JSONResponse({"tokens": tokens})

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(document(self.params.limits))


class Gate:
    """Lets in who has a key, and who calls the server by a name that is its own."""

    def __init__(self, app: ASGIApp, keys: Keys, hosts: tuple[str, ...] | None) -> None:
        self._app, self._keys, self._hosts = app, keys, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or refuse it."""
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> ApiError | None:
        # A web page can make its own name point here: then it asks in the name of its reader.
        if self._hosts is not None and not _is_own(_host_of(request), self._hosts):
            return ApiError(
                403,
                "The server is not called by this name.",
                code="host",
                hint="--allow-host of homespec serve adds one.",
            )
        # Not request.url: older Starlettes make it of the Host header, which is the client's.
        if request.scope["path"] in _OPEN or self._keys.admit(request.headers.get("authorization")):
            return None
        return ApiError(
            401,
            "The API key is missing or wrong.",
            kind="authentication_error",
            code="invalid_api_key",
        )


def _host_of(request: Request) -> str:
    """The Host header without its port."""
    host = request.headers.get("host", "")
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0].lower()


def _is_own(host: str, names: tuple[str, ...]) -> bool:
    """Whether it is one of the names, or an address: nobody can make that point elsewhere."""
    try:
        return host in names or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


async def _told(_: Request, exc: HomespecError) -> Response:
    return error_response(exc)


async def _nobody(_: Request, exc: Gone) -> Response:
    """The client has left: nobody reads it."""
    return Response(status_code=499)


async def _http(_: Request, exc: HTTPException) -> Response:
    """Unknown paths and methods."""
    response = error_response(ApiError(exc.status_code, f"{exc.detail}.", code="not_found"))
    response.headers.update(exc.headers or {})
    return response


async def _unexpected(_: Request, exc: Exception) -> Response:
    return error_response(ApiError(500, "The server failed.", kind="server_error"))
