"""What every kind of download needs: digests remembered, locks, room on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from homespec import paths
from homespec.disk import disk_error, whole_file
from homespec.errors import DiskError
from homespec.models.references import Progress

PART = ".homespec.incomplete"  # follows the name of a file that is still being fetched
_BLOCK_BYTES = 1 << 20
_RESERVE_BYTES = 64 << 20  # a disk filled to its last byte breaks other programs


def sha256_of(path: Path, *, progress: Progress | None = None, label: str = "") -> str:
    """The sha256 of a file as 64 hexadecimal digits; reads it whole."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            if progress:
                progress(label or path.name, done, total)
    return digest.hexdigest()


def _stamp_path(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return paths.cache_dir() / "verified" / f"{key}.json"


def _identity(path: Path, sha256: str) -> dict[str, object]:
    stat = path.stat()
    return {
        "path": str(path.resolve()),
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "sha256": sha256,
    }


def is_verified(path: Path, sha256: str) -> bool:
    """Whether this very file (size and time of change) was found to have this digest before."""
    try:
        stamp = json.loads(_stamp_path(path).read_text())
        return bool(stamp == _identity(path, sha256))
    except (OSError, ValueError):
        return False


def remember_verified(path: Path, sha256: str) -> None:
    """Note the digest of a file, so that a later start need not read gigabytes again."""
    stamp = _stamp_path(path)
    # Without the note the file is only hashed again: a full or read-only disk is no failure here.
    with contextlib.suppress(DiskError, OSError), whole_file(stamp) as part:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(_identity(path, sha256)))


def remembered_sha256(path: Path) -> str:
    """The sha256 of a file; a large one is read once, and its digest remembered."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = str(json.loads(_stamp_path(path).read_text())["sha256"])
        if is_verified(path, known):
            return known
    digest = sha256_of(path)
    remember_verified(path, digest)
    return digest


def forget_verified(path: Path) -> None:
    """Drop the note about a file that is to be removed."""
    with contextlib.suppress(OSError):
        _stamp_path(path).unlink()


def remove_file(path: Path) -> bool:
    """Delete a file and the note about it; whether it was there."""
    forget_verified(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise disk_error(exc, path) from exc
    return True


def verify(path: Path, sha256: str, *, progress: Progress | None = None) -> bool:
    """Whether the file has this digest; reads it only where that is not known yet."""
    if is_verified(path, sha256):
        return True
    if sha256_of(path, progress=progress, label=f"verifying {path.name}") != sha256:
        return False
    remember_verified(path, sha256)
    return True


def require_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise DiskError where the disk that holds `folder` has too little room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed_bytes + _RESERVE_BYTES > free:
        raise DiskError(
            f"{what} needs {human(needed_bytes)} on the disk of {folder}, "
            f"but only {human(free)} are free.",
            hint="Make room, or set HF_HOME (XDG_CACHE_HOME for other files) to a larger disk.",
        )


def human(num_bytes: int) -> str:
    """A size for people: 98.4 MB, 4.92 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            number = num_bytes / scale
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
    return f"{num_bytes} bytes"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes (flock, as filelock does); it dies with its holder."""
    file = _open_locked(path)
    while file is None:
        time.sleep(0.1)  # in steps, so that Ctrl-C ends the wait
        file = _open_locked(path)
    with file:
        yield


def _open_locked(path: Path) -> IO[str] | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as exc:
        raise disk_error(exc, path) from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except BlockingIOError:
        pass
    except OSError:
        return file  # some network file systems know no locks: better unlocked than never
    file.close()
    return None
