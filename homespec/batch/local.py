"""Rows run by the scheduler of this process."""

from __future__ import annotations

from homespec.api import Defaults
from homespec.batch.rows import Row
from homespec.batch.work import Outcome, model_digest, outcome_of, request_of
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.job import Job

_AHEAD = 2  # rows that wait with their prompts ready, so that no sequence stands free


class LocalRunner:
    """Keeps the Runner protocol over an engine."""

    def __init__(self, engine: ParallelEngine, defaults: Defaults) -> None:
        self._engine, self._defaults = engine, defaults
        self._rows: dict[Job, tuple[Row, bool]] = {}
        self._ended: list[Outcome] = []

    @property
    def model_digest(self) -> str:
        """The digest of the model that answers."""
        return model_digest(self._engine)

    @property
    def room(self) -> int:
        """Rows that may be submitted now."""
        return self._engine.parallel + _AHEAD - len(self._rows) - len(self._ended)

    @property
    def idle(self) -> bool:
        """Whether no row is on its way."""
        return not self._rows and not self._ended

    @property
    def num_tokens(self) -> int:
        """Tokens written of rows on their way."""
        return sum(job.num_tokens for job in self._rows)

    def submit(self, row: Row) -> None:
        """Take a row up; one that cannot be done comes back as an outcome."""
        try:
            call, request = request_of(self._engine, row, self._defaults)
            job = self._engine.scheduler.submit(request)
        except Exception as exc:  # whatever is wrong with it, the others go on
            self._ended.append(Outcome.of_error(row, exc))
        else:
            self._rows[job] = (row, call.chat)

    def collect(self) -> list[Outcome]:
        """One step of all rows; those that ended with it."""
        ended, self._ended = self._ended, []
        if self._rows:
            self._engine.scheduler.step()
        for job in [job for job in self._rows if job.done]:
            row, chat = self._rows.pop(job)
            if job.result is not None:
                ended.append(outcome_of(self._engine, row, chat, job.result))
            elif job.error is not None:
                ended.append(Outcome.of_error(row, job.error))
        return ended

    def abort(self) -> None:
        """End the pass under way; may be called by any thread."""
        self._engine.cache.context.abort()

    def drop(self) -> int:
        """Give up all rows on their way; how many."""
        for job in self._rows:
            self._engine.scheduler.cancel(job)
        count = len(self._rows)
        self._rows.clear()
        return count
