"""Random access to the bytes of a file, wherever it lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from homespec.closing import Closing
from homespec.errors import CannotRunError, UsageError


class ByteSource(Protocol):
    """Something of known size that can be read at any offset."""

    @property
    def name(self) -> str:
        """What messages call it: a path or a reference."""
        ...

    @property
    def size(self) -> int:
        """Its length in bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the source ends."""
        ...


class FileSource(Closing):
    """A local file. It is read and not mapped: a mapped file that shrinks kills the process."""

    def __init__(self, path: str | Path) -> None:
        self.name = os.fspath(path)
        try:
            found = os.stat(path)
            if stat.S_ISDIR(found.st_mode):
                raise _is_a_folder(Path(path))
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{self.name} is no regular file.", hint="Name a .gguf file.")
            self._file = open(path, "rb")  # noqa: SIM115  (closed by close)
        except FileNotFoundError as exc:
            raise UsageError(
                f"There is no file {self.name}.", hint="Check the path; it has to end in .gguf."
            ) from exc
        except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
            reason = getattr(exc, "strerror", None) or exc
            raise UsageError(
                f"{self.name} cannot be opened: {reason}.", hint="Check the path and its rights."
            ) from exc
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; CannotRunError where the disk fails."""
        try:
            self._file.seek(offset)
            return self._file.read(length)
        except OSError as exc:
            raise CannotRunError(
                f"{self.name} cannot be read: {exc.strerror or exc}.",
                hint="The disk may be failing; look at the system's log.",
            ) from exc

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _is_a_folder(path: Path) -> UsageError:
    inside = sorted(entry.name for entry in path.glob("*.gguf"))
    hint = f"Name one of the files in it, like {inside[0]}." if inside else "Name a .gguf file."
    return UsageError(f"{path} is a folder, not a file.", hint=hint)
