"""A worker: a Dask worker that holds a model and a scheduler, and the tasks that find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from homespec.api import Defaults
from homespec.batch.rows import Row
from homespec.batch.work import Outcome, model_digest, outcome_of, request_of
from homespec.cluster.connection import NOT_REACHED, load_dask, no_scheduler
from homespec.errors import CannotRunError
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.service import Service


@dataclass(frozen=True, slots=True)
class _Serving:
    """What a worker process holds: tasks find it by the module's global."""

    engine: ParallelEngine
    service: Service
    digest: str


_serving: _Serving | None = None


def resource_of(digest: str) -> str:
    """The name under which a worker offers its sequences of the model with this digest."""
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
    distributed = load_dask()
    service = Service(engine.scheduler)
    digest = model_digest(engine)
    _serving = _Serving(engine, service, digest)

    async def work() -> None:
        try:
            worker = await distributed.Worker(
                address,
                nthreads=engine.parallel,
                resources={resource_of(digest): engine.parallel},
                memory_limit=0,  # the memory plan has seen to it
                death_timeout=30,
                dashboard=False,
            )
        except NOT_REACHED as exc:
            raise no_scheduler(address, exc) from exc
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
