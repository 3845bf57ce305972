"""The files of `homespec batch`: opened, locked, and none twice."""

from __future__ import annotations

from pathlib import Path

from homespec.batch.journal import Journal, Output, Pipe
from homespec.batch.source import Source
from homespec.console import print_note
from homespec.errors import UsageError


def open_files(source: Path, output: Path, errors: Path | None) -> tuple[Source, list[Output]]:
    """The input, and where answers and errors go, all open; no two may be the same.

    A path of - is standard input or output. errors: None for among the answers. Raises UsageError.
    """
    return _open(*(None if path == Path("-") else path for path in (source, output, errors)))


def _open(
    path: Path | None, output: Path | None, errors: Path | None
) -> tuple[Source, list[Output]]:
    _refuse_outputs(output, errors)
    folder = output.resolve().parent if output else None
    source = Source(path, folder)
    opened: list[Journal] = []
    try:
        for name in (output, errors):
            if name is not None:
                _refuse_same(name, path)
                opened.append(Journal(name))
    except BaseException:
        for journal in opened:
            journal.close()
        source.close()
        raise
    for journal in opened:
        if journal.num_repaired:
            print_note(
                f"The last line of {journal.path} was torn ({journal.num_repaired} bytes): cut off."
            )
    return source, [*([] if output else [Pipe()]), *opened]


def _refuse_outputs(output: Path | None, errors: Path | None) -> None:
    if output and errors and output.resolve() == errors.resolve():
        raise UsageError(
            f"-o and --jsonl-errors both name {output}.",
            hint="Without --jsonl-errors rows that failed stand among the answers.",
        )
    for name in (output, errors):
        if name is not None and name.suffix == ".gz":
            raise UsageError(
                f"{name} cannot be gzipped: rows are appended, and a torn one is cut off.",
                hint=f"Name it {name.stem}, and gzip it when the batch is done.",
            )


def _refuse_same(output: Path, source: Path | None) -> None:
    if source is not None and output.exists() and output.samefile(source):
        raise UsageError(f"{output} is the input, too.", hint="Name another output.")
