"""A run over the rows of a file: what is missing is done, written as it comes, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from homespec.api import Defaults
from homespec.batch.journal import Done, Output, outdated
from homespec.batch.rows import BadRow, Row, custom_id_of, line_name, read_row
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
    """Counts of a run. num_skipped: were done before, num_failed_before of them with an error.

    num_dropped: given up at an interrupt.
    """

    num_rows: int
    num_skipped: int = 0
    num_failed_before: int = 0
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
        self._renamed: dict[str, str] = {}  # `line-12` -> the name that line 12 has now
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
        done = Done(self._journals)
        todo, exhausted = self._missing(done), False
        try:
            self._count(done)
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

    def _rows(self) -> Iterator[tuple[Row | BadRow, str]]:
        """All rows, each with its key."""
        for line in self._source.lines():
            row = read_row(line.text, line.number, raw=self._raw)
            yield row, row.key(self._settings)

    def _count(self, done: Done) -> None:
        """Count what is done before work starts: what is left is known from the first row on."""
        if not len(done):
            return
        for row, key in self._rows():
            if self._stopped:
                return
            answered = done.answered(row.custom_id, key)
            failed = not answered and not self._retry and done.failed(row.custom_id, key)
            self.summary.num_skipped += answered or failed
            self.summary.num_failed_before += failed

    def _missing(self, done: Done) -> Iterator[Row | BadRow]:
        for row, key in self._rows():
            times = done.times(row.custom_id)
            finished = done.answered(row.custom_id, key) or (
                not self._retry and done.failed(row.custom_id, key)
            )
            if times > 1 or (times and not finished):
                self._current[row.custom_id] = key
            unnamed = line_name(row.line)
            if row.custom_id != unnamed and done.times(unnamed):
                self._renamed[unnamed] = row.custom_id
            if not finished:
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
        if self._renamed:  # a name of the present input stands for its own row
            for line in self._source.lines():
                self._renamed.pop(custom_id_of(line.text, line.number), None)
        if not self._current and not self._renamed:
            return
        found = outdated(self._journals, self._current, self._renamed)
        for journal, lines in zip(self._journals, found, strict=True):
            if lines:
                journal.drop(lines)
