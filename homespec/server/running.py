"""A request under way: from the scheduler's thread to the event loop, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from homespec.decoding.logprobs import TokenLogprobs
from homespec.decoding.types import FinishReason
from homespec.errors import HomespecError
from homespec.generation import Result
from homespec.scheduling.job import Request
from homespec.scheduling.scheduler import Progress
from homespec.scheduling.service import Service, Ticket
from homespec.server.errors import unavailable


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of a choice; with its end comes `result`."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    result: Result | None = None


class Running:
    """The choices of a request. `cancel` it when nobody waits any longer; twice does no harm.

    time_limit: seconds after which the choices end where they are. ended: hears of each result, of
    those that nobody waits for too, and when it was begun; in the scheduler's thread.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        time_limit: float,
        ended: Callable[[Result, float], None],
    ) -> None:
        self._service, self._ended = service, ended
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | HomespecError] = asyncio.Queue()
        self._open = len(requests)
        self.expired = False
        self._timer = self._loop.call_later(max(0.0, time_limit), self.expire)
        self._tickets = [self._submit(i, request) for i, request in enumerate(requests)]

    def _submit(self, index: int, request: Request) -> Ticket:
        told = Told(index, request, self._put, self._ended)
        ticket = self._service.submit(request, told.hear)
        ticket.result.add_done_callback(lambda done: told.end(done, ticket))
        return ticket

    def _put(self, event: Piece | HomespecError) -> None:
        """From the scheduler's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def pieces(self, silence: float | None = None) -> AsyncIterator[Piece | None]:
        """Until all choices have ended; None after so many seconds of silence.

        Raises the first error of a choice.
        """
        try:
            while self._open:
                try:
                    event = self._events.get_nowait()
                except asyncio.QueueEmpty:
                    try:
                        event = await asyncio.wait_for(self._events.get(), silence)
                    except asyncio.TimeoutError:
                        yield None
                        continue
                if isinstance(event, HomespecError):
                    raise self._too_late() if self.expired else event
                self._open -= event.result is not None
                yield event
        finally:
            self.cancel()

    def finish_reason(self, result: Result) -> str:
        """As the API has it: where the time was up, the length was."""
        if result.finish_reason is FinishReason.CANCELLED:
            return FinishReason.LENGTH.value
        return str(result.finish_reason.value)

    def cancel(self) -> None:
        """End all choices within a step."""
        self._timer.cancel()
        for ticket in self._tickets:
            if not ticket.result.done():
                self._service.cancel(ticket)

    def expire(self) -> None:
        """The time is up: the choices end where they are, and are told."""
        self.expired = True
        self.cancel()

    def _too_late(self) -> HomespecError:
        return unavailable("The time limit of the request was over before it began.")


class Told:
    """Turns a job's progress into pieces. Its methods are called by the scheduler's thread."""

    def __init__(
        self,
        index: int,
        request: Request,
        put: Callable[[Piece | HomespecError], None],
        ended: Callable[[Result, float], None],
    ) -> None:
        self._index, self._put, self._ended = index, put, ended
        # Which tokens a stop string cuts off is known at the end only.
        self._late = bool(request.params.stop)
        self._num_told = 0

    def hear(self, progress: Progress) -> None:
        """A step gave text, or an end; `end` tells of that."""
        job = progress.job
        fresh: tuple[TokenLogprobs, ...] = ()
        if not job.done and not self._late:
            fresh = tuple(job.logprobs[self._num_told :])
            self._num_told += len(fresh)
        text = "".join(chunk.text for chunk in progress.chunks)
        if text or fresh:
            self._put(Piece(self._index, text, fresh))

    def end(self, done: Future[Result], ticket: Ticket) -> None:
        """The future was settled."""
        error = done.exception()
        if isinstance(error, HomespecError):
            self._put(error)
        elif error is not None:
            self._put(unavailable("The answer failed."))
        else:
            result = done.result()
            assert ticket.job is not None  # results come of jobs
            self._ended(result, ticket.job.placed)
            rest = tuple(ticket.job.logprobs[self._num_told : len(result.tokens)])
            self._put(Piece(self._index, "", rest, result))
