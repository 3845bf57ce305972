"""The output file: rows appended whole, found again after any kill, and never by two runs at once.

A row is one line, written with one call and forced to the disk before it counts as done. So a kill
can leave one torn line, the last, which the next run cuts off. A row that is done again (its prompt
changed, or it had failed) is appended too, and the old line taken out once the run ends: nothing
is dropped before its successor is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from homespec.disk import NAMED_HINT, disk_error
from homespec.errors import DiskError, UsageError

_DIGEST = 12  # bytes
Digests = NDArray[np.bytes_]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the output: whose it is, of which request, and whether it is an error."""

    custom_id: str
    key: str
    failed: bool


def digest(*parts: str) -> bytes:
    """A short hash; by millions they are kept in memory, and never end in a zero byte."""
    text = json.dumps(parts).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST - 1).digest() + b"\1"


def read_entry(line: bytes) -> Entry | None:
    """The entry of a line; None where it is none of ours."""
    try:
        row = json.loads(line)
        return Entry(str(row["custom_id"]), str(row["homespec"]["key"]), row["error"] is not None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Journal:
    """An output file that is open, locked, whole and known; close it in the end.

    num_repaired: bytes of a torn line that were cut off.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError where another run has it, or it holds other things; DiskError."""
        self.path = path
        self.num_repaired = 0
        try:
            self._file = self._open()
        except OSError as exc:
            raise disk_error(exc, path, hint=NAMED_HINT) from exc
        try:
            self._repair()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> IO[bytes]:
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a folder.", hint="Name a file with -o.")
        while True:
            file = self.path.open("a+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                file.close()
                raise UsageError(
                    f"Another run is writing {self.path}.",
                    hint="Wait for it, or name another file with -o.",
                ) from exc
            # A run that has just ended may have put a new file in the place of the one locked.
            if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                return file
            file.close()

    def _repair(self) -> None:
        """Cut off a last line that was not written whole; refuse a file that is not ours."""
        end = size = self._file.seek(0, os.SEEK_END)
        if not size:
            return
        self._file.seek(0)
        first = self._file.readline()
        if read_entry(first) is None and not (len(first) == size and _is_torn(first)):
            raise UsageError(
                f"{self.path} holds something else than the answers of a batch.",
                hint="Name another file with -o.",
            )
        self._file.seek(size - 1)
        if self._file.read(1) == b"\n":
            return
        end = self._last_newline(size)
        self._file.seek(end)
        if read_entry(self._file.read()) is not None:  # whole, but for the end of the line
            self._append(b"\n")
            return
        self.num_repaired = size - end
        self._file.truncate(end)
        self._sync()

    def _last_newline(self, size: int) -> int:
        """Where the last line begins."""
        at = size
        while at > 0:
            step = min(at, 1 << 16)
            self._file.seek(at - step)
            found = self._file.read(step).rfind(b"\n")
            if found >= 0:
                return at - step + found + 1
            at -= step
        return 0

    @property
    def identity(self) -> tuple[int, int]:
        """What tells this file from others."""
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino

    def entries(self) -> Iterator[tuple[Entry, bytes]]:
        """All lines, whole. Raises UsageError for one that is none of ours."""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            entry = read_entry(line)
            if entry is None:
                raise UsageError(
                    f"Line {number} of {self.path} is no answer of a batch.",
                    hint="Take it out, or name another file with -o.",
                )
            yield entry, line

    def append(self, rows: Collection[dict[str, Any]]) -> None:
        """Write rows whole, and have the disk hold them. Raises DiskError."""
        self._append(b"".join(encode(row) for row in rows))

    def _append(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:  # O_APPEND: at the end, wherever the file was read last
                view = view[os.write(self._file.fileno(), view) :]
            self._sync()
        except OSError as exc:
            raise disk_error(exc, self.path, hint=NAMED_HINT) from exc

    def _sync(self) -> None:
        os.fsync(self._file.fileno())

    def drop(self, numbers: Collection[int]) -> None:
        """Take out the lines of these numbers, from 0: the file is replaced at once, or not."""
        folder = self.path.resolve().parent
        try:
            file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - it takes the place of ours
                "w+b", dir=folder, prefix=f".{self.path.name}.", delete=False
            )
            try:
                os.fchmod(file.fileno(), os.fstat(self._file.fileno()).st_mode & 0o777)
                for number, (_, line) in enumerate(self.entries()):
                    if number not in numbers:
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(file.name, self.path.resolve())
            except BaseException:
                os.unlink(file.name)
                raise
            file.close()
            self._file.close()
            self._file = self._open()
        except OSError as exc:
            raise DiskError(f"{self.path} cannot be tidied: {exc.strerror}.") from exc

    def close(self) -> None:
        """Close the file, and let others have it."""
        self._file.close()


class Pipe:
    """Standard output in the place of a journal: nothing is known of earlier runs."""

    def entries(self) -> Iterator[tuple[Entry, bytes]]:
        """None."""
        return iter(())

    def append(self, rows: Collection[dict[str, Any]]) -> None:
        """Write rows whole."""
        sys.stdout.buffer.write(b"".join(encode(row) for row in rows))
        sys.stdout.buffer.flush()

    def drop(self, numbers: Collection[int]) -> None:
        """There is nothing to take out."""

    def close(self) -> None:
        """Standard output stays open."""


Output = Journal | Pipe


def encode(row: dict[str, Any]) -> bytes:
    """A row as its line; what JSON cannot say of a text (half a surrogate) is escaped."""
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _is_torn(line: bytes) -> bool:
    """Whether the beginning of a row's line."""
    begin = b'{"id":"batch_req_'
    return line[: len(begin)] == begin[: len(line)]


class Done:
    """What journals hold, by short hashes in sorted arrays: a few bytes a row."""

    def __init__(self, journals: Collection[Output]) -> None:
        """Reads them through."""
        answered, failed, names = bytearray(), bytearray(), bytearray()
        for journal in journals:
            for entry, _ in journal.entries():
                names += digest(entry.custom_id)
                found = failed if entry.failed else answered
                found += digest(entry.custom_id, entry.key)
        self._answered, self._failed = _sorted(answered), _sorted(failed)
        self._names = _sorted(names)

    def __len__(self) -> int:
        return len(self._names)

    def answered(self, custom_id: str, key: str) -> bool:
        """Whether this request has its answer."""
        return _has(self._answered, digest(custom_id, key))

    def failed(self, custom_id: str, key: str) -> bool:
        """Whether this request was tried, and has an error."""
        return _has(self._failed, digest(custom_id, key))

    def times(self, custom_id: str) -> int:
        """How many lines have this name."""
        value = np.array([digest(custom_id)], self._names.dtype)
        low, high = (
            np.searchsorted(self._names, value, side=side)[0] for side in ("left", "right")
        )
        return int(high - low)


def _sorted(digests: bytearray) -> Digests:
    return np.sort(np.frombuffer(bytes(digests), f"S{_DIGEST}"))


def _has(digests: Digests, one: bytes) -> bool:
    at = int(np.searchsorted(digests, np.array(one, digests.dtype)))
    return at < len(digests) and bytes(digests[at]) == one


def outdated(
    journals: Collection[Output], current: dict[str, str], renamed: dict[str, str]
) -> list[set[int]]:
    """For each journal the lines that a later one stands for.

    current: the key of the request as it is now, for names that may have more than one line. Of
    those the last answer to the present request is kept, else its last error, else all.
    renamed: old name -> new name of requests; an error under the old one goes once the new one
    has its line.
    """
    best: dict[str, tuple[int, int, int]] = {}  # (answered, journal, line)
    arrived: set[str] = set()
    awaited = set(renamed.values())
    for place, journal in enumerate(journals):
        for number, (entry, _) in enumerate(journal.entries()):
            if entry.custom_id in awaited:
                arrived.add(entry.custom_id)
            if current.get(entry.custom_id) == entry.key:
                found = (not entry.failed, place, number)
                best[entry.custom_id] = max(best.get(entry.custom_id, found), found)
    return [
        {
            number
            for number, (entry, _) in enumerate(journal.entries())
            if (entry.custom_id in best and best[entry.custom_id][1:] != (place, number))
            or (entry.failed and renamed.get(entry.custom_id) in arrived)
        }
        for place, journal in enumerate(journals)
    ]
