"""Hands the rows of a batch to the workers of a cluster, and collects what they answered."""

from __future__ import annotations

import asyncio
import queue
import time
from typing import Any

from homespec.api import Defaults
from homespec.batch.rows import Row
from homespec.batch.work import Outcome
from homespec.cluster.connection import (
    NOT_REACHED,
    check_address,
    connected,
    load_dask,
    no_scheduler,
    scheduler_lost,
)
from homespec.cluster.worker import describe_worker, do_row, resource_of
from homespec.decoding.stats import clock
from homespec.errors import CannotRunError, NetworkError, UsageError

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 2.0
_RESULT_SECONDS = 30.0  # for one answer to come over; tried again


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
        distributed = load_dask()
        self._defaults, self._retries = defaults, retries
        check_address(distributed, address)
        try:
            self._client = distributed.Client(address, timeout=5, set_as_default=False)
        except NOT_REACHED as exc:
            raise no_scheduler(address, exc) from exc
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
            with connected():
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
            self._looked, name = clock(), resource_of(self._digest)
            with connected():
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
        with connected():
            future = self._client.submit(
                do_row,
                row,
                self._defaults,
                resources={resource_of(self._digest): 1},
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
            raise scheduler_lost()

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
