"""Writing to a disk: whole or not at all, and a plain sentence where it fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from homespec.errors import DiskError

CACHE_HINT = "Check the folder's permissions, or set HF_HOME or XDG_CACHE_HOME to another one."
NAMED_HINT = "See that its folder is there and may be written, or name another file."
"""For a file whose name the user gave."""


@contextlib.contextmanager
def whole_file(path: Path, *, hint: str = CACHE_HINT) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` at the end; nothing else is left.

    hint: what to do where it cannot be written.
    Raises DiskError for any OSError of the block, a folder that is missing among them.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as exc:
        raise disk_error(exc, path, hint=hint) from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def disk_error(exc: OSError, path: Path, *, hint: str = CACHE_HINT) -> DiskError:
    """The plain sentence for a write that failed, and what to do."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(
            f"The disk of {path} is full.", hint="Make room and start again: it goes on from here."
        )
    return DiskError(f"{path} cannot be written: {exc.strerror or exc}.", hint=hint)
