"""A run over the rows of a file: what is missing is done, written as it comes, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from homespec.api import Defaults
from homespec.batch.journal import Done, Output, outdated
from homespec.batch.rows import BadRow, Row, read_row
from homespec.batch.source import Source
from homespec.batch.work import Outcome, settings_digest
from homespec.decoding.stats import clock


class Runner(Protocol):
    """Something that runs rows: this process, or machines of a cluster."""

    @property
    def model_digest(self) -> str:
        """The digest of the model that answers."""
        ...

    @property
    def room(self) -> int:
        """Rows that may be submitted now."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no row is on its way."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens written of rows on their way."""
        ...

    def submit(self, row: Row) -> None:
        """Take a row up."""
        ...

    def collect(self) -> list[Outcome]:
        """Work on, or wait, for a moment; the rows that ended."""
        ...

    def abort(self) -> None:
        """End what is under way; may be called by any thread."""
        ...

    def drop(self) -> int:
        """Give up all rows on their way; how many."""
        ...


@dataclass(slots=True)
class Summary:
    """Counts of a run. num_skipped: were done before; num_dropped: given up at an interrupt."""

    num_rows: int
    num_skipped: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def num_left(self) -> int:
        """Rows that a next run would do."""
        return self.num_rows - self.num_skipped - self.num_done - self.num_failed

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


Tell = Callable[[Summary], None]


class BatchRun:
    """One run. `stop` and `drop` may be called while it runs, by a signal handler or a thread.

    answers: where rows go; errors: where those that failed go, the same journal if they share it.
    """

    def __init__(
        self,
        source: Source,
        runner: Runner,
        defaults: Defaults,
        answers: Output,
        errors: Output | None = None,
        *,
        num_rows: int,
        retry_errors: bool = False,
    ) -> None:
        self._source, self._runner = source, runner
        self._answers, self._errors = answers, errors or answers
        self._journals = [answers, errors] if errors else [answers]
        self._raw, self._retry = defaults.params.raw, retry_errors
        self._settings = settings_digest(runner.model_digest, defaults)
        self._current: dict[str, str] = {}  # name -> key, where a name may have several lines
        self._stopped = self._dropped = False
        self.summary = Summary(num_rows)
        self._done_tokens = 0

    def stop(self) -> None:
        """Begin no more rows; those on their way are finished."""
        self._stopped = True

    def drop(self) -> None:
        """Give up the rows on their way, too."""
        self._stopped = self._dropped = True
        self._runner.abort()

    def run(self, tell: Tell = lambda _: None) -> Summary:
        """Do what is missing; tell: called often, with the counts so far."""
        began, summary, runner = clock(), self.summary, self._runner
        todo, exhausted = self._missing(), False
        try:
            while not self._dropped:
                while runner.room > 0 and not exhausted and not self._stopped:
                    row = next(todo, None)
                    exhausted = row is None
                    if isinstance(row, BadRow):
                        self._fail(row)
                    elif row is not None:
                        runner.submit(row)
                if runner.idle:
                    break
                self._write(runner.collect())
                summary.num_tokens = self._done_tokens + runner.num_tokens
                summary.seconds = clock() - began
                tell(summary)
        except KeyboardInterrupt:
            self._stopped = True
        summary.num_dropped = runner.drop()
        summary.interrupted = self._stopped and not (exhausted and not summary.num_dropped)
        summary.num_tokens = self._done_tokens
        self._tidy()
        summary.seconds = clock() - began
        tell(summary)
        return summary

    def _missing(self) -> Iterator[Row | BadRow]:
        done = Done(self._journals)
        for line in self._source.lines():
            row = read_row(line.text, line.number, raw=self._raw)
            key = row.key(self._settings)
            times = done.times(row.custom_id)
            finished = done.answered(row.custom_id, key) or (
                not self._retry and done.failed(row.custom_id, key)
            )
            if times > 1 or (times and not finished):
                self._current[row.custom_id] = key
            if finished:
                self.summary.num_skipped += 1
            else:
                yield row

    def _fail(self, row: BadRow) -> None:
        stand_in = Row(row.line, row.custom_id, "", {})
        line = Outcome.of_error(stand_in, row.error).line(row.key(self._settings))
        self._errors.append([line])
        self.summary.num_failed += 1

    def _write(self, outcomes: list[Outcome]) -> None:
        good = [one for one in outcomes if one.body is not None]
        bad = [one for one in outcomes if one.body is None]
        for journal, ended in ((self._answers, good), (self._errors, bad)):
            if ended:
                journal.append([one.line(one.row.key(self._settings)) for one in ended])
        self.summary.num_done += len(good)
        self.summary.num_failed += len(bad)
        for one in good:
            assert one.body is not None
            self._done_tokens += one.body["usage"]["completion_tokens"]
            self.summary.num_prompt_tokens += one.body["usage"]["prompt_tokens"]

    def _tidy(self) -> None:
        """Take out lines that others stand for now."""
        if not self._current:
            return
        for journal, lines in zip(
            self._journals, outdated(self._journals, self._current), strict=True
        ):
            if lines:
                journal.drop(lines)
