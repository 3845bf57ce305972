"""The endpoints that answer: a request read, run, and written back whole or in events."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from homespec.api import Defaults
from homespec.decoding.stats import GenerationStats, clock
from homespec.errors import HomespecError
from homespec.generation import Result
from homespec.server.admission import Admission
from homespec.server.asked import Asked, read_asked, requests_of
from homespec.server.bodies import Bodies, Choice
from homespec.server.errors import as_api_error, error_body, unavailable
from homespec.server.host import Host, Resident, in_thread
from homespec.server.leaving import Gone, gone, unless
from homespec.server.limits import read_body
from homespec.server.metrics import Metrics
from homespec.server.running import Piece, Running
from homespec.server.settings import ServerParams
from homespec.server.sse import DONE, PING, PING_SECONDS, Streamed, event
from homespec.server.tools import Held

logger = logging.getLogger("homespec.server")

CLOSED = 499  # nobody is there to read the status


class Answering:
    """What the endpoints share."""

    def __init__(
        self, host: Host, defaults: Defaults, params: ServerParams, metrics: Metrics
    ) -> None:
        self.host, self.defaults, self.params, self.metrics = host, defaults, params, metrics
        self.admission = Admission(params.queue)
        self.runs: set[Running] = set()

    def end_all(self) -> None:
        """End all answers where they are."""
        for running in list(self.runs):
            running.expire()

    async def answer(self, url: str, request: Request) -> Response:
        """The response to a request of this endpoint. Raises HomespecError."""
        one = _One(self, url, secrets.token_hex(8))
        try:
            return await one.respond(request)
        except Gone:
            one.note(CLOSED)
            return Response(status_code=CLOSED)
        except HomespecError as exc:
            one.note(as_api_error(exc).status)
            raise
        except asyncio.CancelledError:
            one.note(CLOSED)
            raise


class _One:
    """One request on its way."""

    def __init__(self, shared: Answering, url: str, name: str) -> None:
        self._shared, self._url, self._name = shared, url, name
        self._began = clock()
        self._choices: list[Choice] = []
        self._ended: dict[int, GenerationStats] = {}

    async def respond(self, request: Request) -> Response:
        shared = self._shared
        body = await read_body(request, shared.params.limits)
        # Schemas and prompts are read in a thread: meanwhile others are served.
        asked = await in_thread(
            lambda: read_asked(self._url, body, shared.defaults, shared.params.limits)
        )
        if shared.params.log_prompts:
            logger.info("%s asks %s", self._name, json.dumps(body, ensure_ascii=False))
        async with AsyncExitStack() as stack:
            stack.enter_context(shared.admission.admit(asked.num_choices))
            left = asyncio.ensure_future(gone(request))
            stack.callback(left.cancel)
            running, resident = await unless(left, self._start(asked, stack))
            events = running.pieces(PING_SECONDS if asked.stream else None)
            self._open(asked, resident)
            if not asked.stream:
                await unless(left, self._collect(asked, running, events))
                self.note(200)
                return JSONResponse(self._bodies.whole(self._choices, self._stats))
            # What is wrong with a request shows with its first event: then a status can tell it.
            first = await unless(left, anext(events))
            left.cancel()
            texts = self._stream(asked, running, first, events)
            return Streamed(texts, stack.pop_all())

    def _open(self, asked: Asked, resident: Resident) -> None:
        """Begin the answer."""
        self._bodies = Bodies(
            resident.engine.tokenizer,
            model=self._shared.params.name or resident.engine.model.path.stem,
            chat=asked.chat,
            n=asked.n,
            told=asked.num_logprobs is not None,
            old=asked.tools is not None and asked.tools.old,
        )
        self._choices = [Choice(i) for i in range(asked.num_choices)]

    async def _start(self, asked: Asked, stack: AsyncExitStack) -> tuple[Running, Resident]:
        """Load the model where that is due, and hand the request to its scheduler."""
        shared = self._shared
        limit = shared.params.time_limit
        try:
            resident = await asyncio.wait_for(
                stack.enter_async_context(shared.host.use()), timeout=limit
            )
        except asyncio.TimeoutError as exc:
            raise unavailable("The model is still being loaded.") from exc
        shared.admission.parallel = resident.engine.parallel
        requests = await in_thread(lambda: requests_of(resident, asked))
        waited = clock() - self._began

        def ended(result: Result, placed: float) -> None:
            first = placed - self._began + result.stats.time_to_first_token_seconds
            shared.metrics.answered(result.stats, first)

        running = Running(resident.service, requests, limit - waited, ended)
        shared.runs.add(running)
        stack.callback(shared.runs.discard, running)
        stack.callback(running.cancel)
        return running, resident

    async def _collect(
        self, asked: Asked, running: Running, events: AsyncIterator[Piece | None]
    ) -> None:
        async for piece in events:
            if piece is not None:
                self._take(asked, running, piece)

    def _take(self, asked: Asked, running: Running, piece: Piece) -> Choice:
        """Note what came of a choice."""
        choice = self._choices[piece.index]
        choice.text += piece.text
        choice.logprobs += piece.logprobs
        if piece.result is not None:
            self._ended[piece.index] = piece.result.stats
            choice.finish_reason = running.finish_reason(piece.result)
            if asked.tools is not None:
                choice.text, choice.calls = asked.tools.read(choice.text)
                if choice.calls:
                    choice.finish_reason = "function_call" if asked.tools.old else "tool_calls"
        return choice

    async def _stream(
        self,
        asked: Asked,
        running: Running,
        first: Piece | None,
        events: AsyncIterator[Piece | None],
    ) -> AsyncIterator[str]:
        held = {i: Held(asked.tools) for i in range(asked.num_choices)} if asked.tools else {}
        status, told = CLOSED, clock()
        try:
            for index in range(asked.num_choices if asked.chat else 0):
                yield event(self._bodies.first(index))
            piece: Piece | None = first
            while True:
                bodies = [] if piece is None else self._events(asked, running, piece, held)
                for body in bodies:
                    yield event(body)
                if bodies:
                    told = clock()
                elif piece is None or clock() - told >= PING_SECONDS:  # what is held back is silent
                    yield PING
                    told = clock()
                try:
                    piece = await anext(events)
                except StopAsyncIteration:
                    break
            if asked.include_usage:
                yield event(self._bodies.usage(self._stats))
            yield DONE
            status = 200
        except HomespecError as exc:
            status = as_api_error(exc).status
            yield event(error_body(exc))
        finally:
            self.note(status)

    def _events(
        self, asked: Asked, running: Running, piece: Piece, holds: dict[int, Held]
    ) -> list[dict[str, Any]]:
        """The bodies that a piece makes."""
        bodies, index, held = self._bodies, piece.index, holds.get(piece.index)
        text = held.push(piece.text) if held else piece.text
        found = []
        if text or piece.logprobs:
            found.append(bodies.piece(index, text, piece.logprobs))
        choice = self._take(asked, running, piece)
        if piece.result is not None:
            if choice.calls:
                found.append(bodies.calls(index, choice.calls))
            elif held and held.rest:
                found.append(bodies.piece(index, held.rest))
            assert choice.finish_reason is not None
            found.append(
                bodies.last(
                    index,
                    choice.finish_reason,
                    piece.result.stats,
                    with_usage=asked.include_usage,
                )
            )
        return found

    @property
    def _stats(self) -> list[GenerationStats]:
        """Of the choices that have ended, in their order."""
        return [stats for _, stats in sorted(self._ended.items())]

    def note(self, status: int) -> None:
        """Count and log it: figures, and nothing of what was said."""
        self._shared.metrics.requests.labels(str(status)).inc()
        prompt = sum(stats.num_prompt_tokens for stats in self._stats)
        tokens = sum(stats.num_tokens for stats in self._stats)
        logger.info(
            "%s %s %d: %d tokens read, %d written, %.2f s",
            self._name,
            self._url,
            status,
            prompt,
            tokens,
            clock() - self._began,
        )
        if self._shared.params.log_prompts and self._choices:
            texts = [choice.text for choice in self._choices]
            logger.info("%s answers %s", self._name, json.dumps(texts, ensure_ascii=False))
