"""Rows on more than one machine: a Dask cluster, with one copy of the model per worker.

The machine that runs `homespec batch --cluster` reads the rows, hands them out, and alone writes
the output: resume and locks are those of a run on one machine. A worker is a Dask worker that holds
a model and a scheduler; it takes as many rows at once as its scheduler has sequences, by the
resource it offers. That is named after the model's digest, so rows go only where that very model
is. Dask gives the rows of a worker that died to others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from homespec.api import Defaults
from homespec.batch.rows import Row
from homespec.batch.work import Outcome, model_digest, outcome_of, request_of
from homespec.decoding.stats import clock
from homespec.errors import CannotRunError, HomespecError, LibraryError, NetworkError, UsageError
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.service import Service

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 2.0
_LOGS = ("distributed", "distributed.client", "distributed.worker", "tornado.application")
_RESULT_SECONDS = 30.0  # for one answer to come over; tried again


def _distributed() -> Any:
    """The one door to Dask. Raises LibraryError where it is not installed."""
    try:
        import distributed  # noqa: PLC0415 - an optional extra, and slow to load
    except ImportError as exc:
        raise LibraryError(
            f"Dask distributed cannot be loaded: {exc}.",
            hint='Install the extra: pip install "homespec[cluster]".',
        ) from exc
    for name in _LOGS:  # they tell every step, with tracebacks; what matters is raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return distributed


@dataclass(frozen=True, slots=True)
class _Serving:
    """What a worker process holds: tasks find it by the module's global."""

    engine: ParallelEngine
    service: Service
    digest: str


_serving: _Serving | None = None


def _resource(digest: str) -> str:
    return f"homespec-{digest[:16]}"


def describe_worker() -> dict[str, Any] | None:
    """What this process serves, None where it is no homespec worker; a task of the cluster."""
    if _serving is None:
        return None
    engine = _serving.engine
    return {
        "digest": _serving.digest,
        "model": engine.model.path.name,
        "parallel": engine.parallel,
    }


def do_row(row: Row, defaults: Defaults) -> Outcome:
    """Answer a row with the model of this process; a task of the cluster."""
    if _serving is None:
        raise RuntimeError("this process serves no model")
    try:
        call, request = request_of(_serving.engine, row, defaults)
        result = _serving.service.submit(request).result.result()
        return outcome_of(_serving.engine, row, call.chat, result)
    except (CannotRunError, MemoryError):
        raise  # this worker's trouble, not the row's: another one may do it
    except Exception as exc:
        return Outcome.of_error(row, exc)


def serve(
    address: str, engine: ParallelEngine, ready: Callable[[str], None] = lambda _: None
) -> None:
    """Be a worker of the cluster until it ends or is interrupted. ready: told the own address.

    Raises NetworkError where there is no scheduler at `address`, UsageError where it is none.
    """
    global _serving  # noqa: PLW0603 - tasks are functions: they find the process's model here
    distributed = _distributed()
    service = Service(engine.scheduler)
    digest = model_digest(engine)
    _serving = _Serving(engine, service, digest)

    async def work() -> None:
        try:
            worker = await distributed.Worker(
                address,
                nthreads=engine.parallel,
                resources={_resource(digest): engine.parallel},
                memory_limit=0,  # the memory plan has seen to it
                death_timeout=30,
                dashboard=False,
            )
        except _NOT_REACHED as exc:
            raise _no_scheduler(address, exc) from exc
        ready(worker.address)
        try:
            await worker.finished()
        finally:
            await worker.close(executor_wait=False)

    try:
        asyncio.run(work())
    finally:
        _serving = None
        service.close()


class ClusterRunner:
    """Keeps the Runner protocol over the workers of a cluster. Close it in the end."""

    def __init__(
        self, address: str, defaults: Defaults, *, wait_seconds: float = 60, retries: int = 3
    ) -> None:
        """Connect, and wait for a first homespec worker.

        retries: how often a row is handed out again after a worker's trouble. Raises NetworkError
        where no scheduler or worker is there, UsageError where `address` is none, or workers hold
        different models.
        """
        distributed = _distributed()
        self._defaults, self._retries = defaults, retries
        _check_address(distributed, address)
        try:
            self._client = distributed.Client(address, timeout=5, set_as_default=False)
        except _NOT_REACHED as exc:
            raise _no_scheduler(address, exc) from exc
        self._futures: dict[Any, Row] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unsettled: list[Any] = []  # ended, but their outcome cannot be had yet
        self._looked, self._capacity = 0.0, 0
        try:
            self._digest, self.model_name = self._find_model(wait_seconds)
        except BaseException:
            self.close()
            raise

    def _find_model(self, wait_seconds: float) -> tuple[str, str]:
        """(digest, name) of the model that the workers hold."""
        began = clock()
        while True:
            with _connected():
                answers = self._client.run(describe_worker, on_error="ignore")
            found = {worker: about for worker, about in answers.items() if about}
            if found:
                break
            if clock() - began > wait_seconds:
                raise NetworkError(
                    "The cluster has no homespec worker.",
                    hint="Start some: homespec worker tcp://HOST:8786 [PAIR].",
                )
            time.sleep(_POLL_SECONDS)
        models: dict[str, str] = {about["digest"]: about["model"] for about in found.values()}
        if len(models) > 1:
            raise UsageError(
                f"The cluster's workers hold different models: {', '.join(models.values())}.",
                hint="Start all of them with the same file.",
            )
        return next(iter(models.items()))

    @property
    def model_digest(self) -> str:
        """The digest of the model that the workers hold."""
        return self._digest

    @property
    def room(self) -> int:
        """Rows that may be submitted now: a few more than there are sequences in the cluster."""
        if clock() - self._looked > _LOOK_SECONDS:
            self._looked, name = clock(), _resource(self._digest)
            with _connected():
                workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
            self._capacity = int(sum(one["resources"].get(name, 0) for one in workers))
        return self._capacity + self._capacity // 2 + 1 - len(self._futures)

    @property
    def idle(self) -> bool:
        """Whether no row is on its way."""
        return not self._futures

    @property
    def num_tokens(self) -> int:
        """Not known of rows on their way."""
        return 0

    def submit(self, row: Row) -> None:
        """Hand a row out."""
        with _connected():
            future = self._client.submit(
                do_row,
                row,
                self._defaults,
                resources={_resource(self._digest): 1},
                pure=False,
                retries=self._retries,
            )
        self._futures[future] = row
        future.add_done_callback(self._ended.put)

    def collect(self) -> list[Outcome]:
        """Wait a moment; the rows that ended. Raises NetworkError where the scheduler was lost."""
        ended, self._unsettled = self._unsettled, []
        try:
            ended.append(self._ended.get(timeout=_POLL_SECONDS))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        outcomes = []
        for future in ended:
            outcome = self._outcome(future, self._futures[future])
            if outcome is None:
                self._unsettled.append(future)
            else:
                del self._futures[future]
                outcomes.append(outcome)
        if not outcomes:  # what has come is written first
            self._check_connection()
        return outcomes

    def _outcome(self, future: Any, row: Row) -> Outcome | None:
        """What became of a row; None where that is not known, or not known any more.

        A worker may die after it has told that a row is done: Dask then does it again.
        """
        if future.status not in ("finished", "error"):
            return None
        try:
            outcome: Outcome = future.result(timeout=_RESULT_SECONDS)
        except (Exception, asyncio.CancelledError) as exc:
            late = isinstance(exc, asyncio.TimeoutError) and future.status == "finished"
            if late or future.status not in ("finished", "error"):
                return None
            error = CannotRunError(f"The row was lost in the cluster: {exc}.")
            outcome = Outcome.of_error(row, error)
        return outcome

    def _check_connection(self) -> None:
        """A client that loses its scheduler cancels all it has handed out; nobody else does."""
        cancelled = any(future.status == "cancelled" for future in self._unsettled)
        if cancelled or self._client.status == "closed":
            raise _scheduler_lost()

    def abort(self) -> None:
        """Nothing is under way in this process."""

    def drop(self) -> int:
        """Give up all rows on their way; how many."""
        count = len(self._futures)
        if count:
            self._client.cancel(list(self._futures), force=True)
        self._futures.clear()
        return count

    def close(self) -> None:
        """Leave the cluster."""
        self._client.close()


_NOT_REACHED = (OSError, asyncio.TimeoutError, ValueError, TypeError, RuntimeError)


def _no_scheduler(address: str, exc: Exception) -> HomespecError:
    cause = exc.__cause__ or exc  # Dask wraps what went wrong
    if isinstance(cause, (OSError, asyncio.TimeoutError)):
        return NetworkError(
            f"There is no Dask scheduler at {address}: {cause}.",
            hint="Start one: dask scheduler --port 8786.",
        )
    return _no_address(address, str(cause))


def _no_address(address: str, reason: str) -> UsageError:
    return UsageError(
        f"{address} cannot be used as an address: {reason}.",
        hint="It is like tcp://192.168.1.10:8786; tls:// needs certificates (docs/cluster.md).",
    )


def _check_address(distributed: Any, address: str) -> None:
    """Raise UsageError for an address that a client would take, and then hang at its end."""
    try:
        distributed.comm.get_address_host(address)
    except ValueError as exc:
        raise _no_address(address, str(exc)) from exc
    if address.startswith(("tls://", "wss://")):
        settings = distributed.Security().get_connection_args("client")
        if settings.get("ssl_context") is None:
            raise _no_address(address, "no certificates are configured")


@contextmanager
def _connected() -> Iterator[None]:
    """Raises NetworkError for whatever Dask raises where it has lost its scheduler."""
    try:
        yield
    except Exception as exc:
        raise _scheduler_lost() from exc


def _scheduler_lost() -> NetworkError:
    return NetworkError(
        "The cluster's scheduler does not answer any more.",
        hint="Start it again, and the workers; then the same command does what is missing.",
    )
