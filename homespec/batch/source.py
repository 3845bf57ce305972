"""The input, streamed twice: first to count rows and find names used twice, then to do them."""

from __future__ import annotations

import array
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from homespec.batch.rows import MAX_LINE_BYTES, custom_id_of
from homespec.errors import DiskError, UsageError

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. number: from 1. text: cut where it is longer than can be meant."""

    number: int
    text: bytes


class Source:
    """The lines of a file, gzipped or not, or of standard input; a pipe may have a name, too.

    A pipe can be read once only, and names used twice must be found before work starts: what comes
    through one is first put into a temporary file without a name, in `folder`.
    """

    def __init__(self, path: Path | None, folder: Path | None = None) -> None:
        """path: None for standard input. Raises UsageError and DiskError."""
        self.name = str(path) if path else "standard input"
        try:
            # The file stays open between the passes: one that is replaced meanwhile is not mixed.
            file: IO[bytes] = path.open("rb") if path else os.fdopen(os.dup(0), "rb")
        except OSError as exc:
            raise UsageError(f"{self.name} cannot be read: {exc.strerror}.") from exc
        self._file = file if file.seekable() else self._spooled(file, folder)

    def _spooled(self, file: IO[bytes], folder: Path | None) -> IO[bytes]:
        try:
            spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is what is returned
            with file:
                shutil.copyfileobj(file, spool, 1 << 20)
            spool.flush()
        except OSError as exc:
            raise DiskError(
                f"{self.name} cannot be kept: {exc.strerror}.", hint="Name a file with -i."
            ) from exc
        return spool

    @property
    def identity(self) -> tuple[int, int]:
        """What tells this file from others."""
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino

    def lines(self) -> Iterator[Line]:
        """From the beginning. Raises UsageError for a broken archive."""
        self._file.seek(0)
        magic = self._file.read(2)
        self._file.seek(0)
        stream: IO[bytes] = gzip.open(self._file) if magic == _GZIP else self._file  # type: ignore[assignment]  # noqa: SIM115 - closing it would close the file
        number = 0
        try:
            while text := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                rest = text
                while not rest.endswith(b"\n") and (rest := stream.readline(MAX_LINE_BYTES)):
                    pass
                if number == 1:
                    text = text.removeprefix(_BOM)
                if text.strip():
                    yield Line(number, text)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise UsageError(f"{self.name} is no whole gzip file: {exc}.") from exc

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def survey(source: Source) -> int:
    """The number of rows. Raises UsageError where two have one name, with both lines.

    Eight bytes a row are kept, so that a file of any size passes through.
    """
    hashes = array.array("Q")
    for line in source.lines():
        hashes.append(_hash(custom_id_of(line.text, line.number)))
    values = np.sort(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)
    suspects = {int(value) for value in values[1:][values[1:] == values[:-1]]}
    if suspects:
        _refuse_doubles(source, suspects)
    return len(hashes)


def _refuse_doubles(source: Source, suspects: set[int]) -> None:
    """Hashes may meet by chance: the names decide."""
    seen: dict[str, int] = {}
    for line in source.lines():
        name = custom_id_of(line.text, line.number)
        if _hash(name) in suspects:
            if name in seen:
                raise UsageError(
                    f"custom_id {name!r} stands in lines {seen[name]} and {line.number} of "
                    f"{source.name}.",
                    hint="Give each row a name of its own: answers are found by it.",
                )
            seen[name] = line.number


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
