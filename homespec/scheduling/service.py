"""A scheduler with a thread of its own: requests come from any thread, answers go back to it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from homespec.errors import CannotRunError, HomespecError
from homespec.generation import Result
from homespec.scheduling.job import Job, Request
from homespec.scheduling.scheduler import Progress, Scheduler

logger = logging.getLogger(__name__)

Listener = Callable[[Progress], None]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was handed in. `result` is a future of it; errors come through it, too."""

    result: Future[Result] = field(default_factory=Future)
    job: Job | None = None
    cancelled: bool = False


class Service:
    """Steps a scheduler as long as there is something to do. Close it in the end.

    What is called from outside is done by its thread, between two steps: the scheduler itself is
    never touched by another one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[Job, tuple[Ticket, Listener | None]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="homespec-steps", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener | None = None) -> Ticket:
        """Hand a request in. listener: hears of each step that gave text, in the service's thread.

        What is wrong with the request (UsageError, ContextFullError) comes through the future.
        """
        ticket = Ticket()
        self._calls.put(lambda: self._submit(request, ticket, listener))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request within a step: its future gives what came so far, or an error."""
        self._calls.put(lambda: self._cancel(ticket))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have something done with the scheduler, by the thread that steps it."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as exc:
                done.set_exception(exc)

        self._calls.put(run)
        return done

    def close(self) -> None:
        """Cancel what is open, and end the thread; once is enough, twice does no harm."""
        self._closing = True
        self._calls.put(lambda: None)
        self._thread.join()

    def _submit(self, request: Request, ticket: Ticket, listener: Listener | None) -> None:
        if ticket.cancelled:
            ticket.result.set_exception(_dropped())
            return
        try:
            ticket.job = self.scheduler.submit(request)
        except Exception as exc:  # whatever is wrong with it, the others go on
            ticket.result.set_exception(exc)
        else:
            self._open[ticket.job] = (ticket, listener)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if ticket.job is not None and ticket.job in self._open:
            self.scheduler.cancel(ticket.job)
            self._settle(ticket.job)

    def _settle(self, job: Job) -> None:
        ticket, _ = self._open.pop(job)
        if job.result is not None:
            ticket.result.set_result(job.result)
        else:
            ticket.result.set_exception(job.error or _dropped())

    def _run(self) -> None:
        while not self._closing:
            self._call(wait=self.scheduler.idle)
            if self.scheduler.idle:
                continue
            try:
                progress = self.scheduler.step()
            except (Exception, KeyboardInterrupt) as exc:
                logger.debug("A step failed.", exc_info=exc)
                self._fail(exc if isinstance(exc, HomespecError) else _dropped())
                continue
            for one in progress:
                self._tell(one)
        self._call(wait=False)  # what was handed in meanwhile is refused like the rest
        for ticket, _ in list(self._open.values()):
            self._cancel(ticket)

    def _call(self, *, wait: bool) -> None:
        """Do what was asked from outside; wait for something where there is nothing else to do."""
        if wait:
            self._calls.get()()
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _tell(self, progress: Progress) -> None:
        found = self._open.get(progress.job)
        if found is None:
            return
        if found[1] is not None:
            found[1](progress)
        if progress.job.done:
            self._settle(progress.job)

    def _fail(self, error: HomespecError) -> None:
        """A pass failed: nothing of it can go on."""
        for job in list(self._open):
            self.scheduler.cancel(job)
            job.result, job.error = None, error
            self._settle(job)


def _dropped() -> HomespecError:
    return CannotRunError("The request was dropped.")
