"""The hub's shared cache on the disk, as its documentation lays it out.

models--user--repo/refs/REVISION           the commit a branch or tag meant when asked
models--user--repo/snapshots/COMMIT/path   links into blobs/
models--user--repo/blobs/ETAG              contents; large files by their sha256;
                                           or links into blobs/ of the whole cache
.locks/models--user--repo/ETAG.lock        who brings a content holds this
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from homespec.disk import disk_error
from homespec.models.files import PART, locked, remove_file
from homespec.models.references import HubFile, shard_names

_NOTE = ".path"  # follows the name of an unfinished download: which file it is going to be
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubCache:
    """One repository's part of the cache below `root`."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        return self.root / f"models--{self.repo.replace('/', '--')}"

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / etag

    def snapshot(self, revision: str) -> Path:
        """The folder of a revision, whether it exists or not."""
        with contextlib.suppress(OSError):
            revision = (self.folder / "refs" / revision).read_text().strip()
        return self.folder / "snapshots" / revision

    def locate(self, source: HubFile) -> Path | None:
        """Where the file is at hand, also under another revision with the pinned content.

        Not so a part of a split model: llama.cpp looks for the others beside it.
        """
        path = self.snapshot(source.revision) / source.path
        if os.path.isfile(path):
            return path
        if source.sha256 is None or shard_names(source.name)[1:]:
            return None
        others = (self.folder / "snapshots").glob(f"*/{glob.escape(source.path)}")
        return next((o for o in others if o.is_file() and blob_sha256(o) == source.sha256), None)

    @contextlib.contextmanager
    def lock(self, etag: str) -> Iterator[None]:
        """The very lock that other tools take to bring this content."""
        with locked(self.root / ".locks" / self.folder.name / f"{etag}.lock"):
            yield

    @contextlib.contextmanager
    def downloading(self, etag: str, path: str) -> Iterator[None]:
        """Keep beside an unfinished download which file it is: its name does not tell."""
        note = _note(self.blob(etag))
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(path)
        except OSError as exc:
            raise disk_error(exc, note) from exc
        try:
            yield
        finally:
            if not _part(self.blob(etag)).exists():
                note.unlink(missing_ok=True)

    def _begun(self, path: str) -> Iterator[Path]:
        """The blobs that unfinished downloads of this file are going to be."""
        for part in (self.folder / "blobs").glob(f"*{PART}"):
            blob = part.with_name(part.name.removesuffix(PART))
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if _note(blob).read_text() == path:
                    yield blob

    def models(self) -> dict[str, str]:
        """The GGUF files at hand, each with the revision that has it: `main` before older ones."""
        found: dict[str, str] = {}
        folders = sorted(self.folder.glob("snapshots/*"), key=lambda one: one.stat().st_mtime)
        for folder in (*folders, self.snapshot("main")):
            revision = "main" if folder == self.snapshot("main") else folder.name
            for file in folder.rglob("*.gguf"):
                if file.is_file():
                    found[str(file.relative_to(folder))] = revision
        return found

    def contents_of(self, source: HubFile) -> list[Path]:
        """The blobs of a file and its unfinished downloads, but for those another entry has."""
        path = self.locate(source)
        blobs = [*self._begun(source.path)]
        if path is not None:
            blobs.append(_content(path))
        elif source.sha256 is not None:
            blobs.append(self.blob(source.sha256))
        links = (p for p in (self.folder / "snapshots").rglob("*") if p.is_symlink())
        elsewhere = {_content(link) for link in links if link != path}
        return [
            file
            for blob in {_written_out(blob) for blob in blobs} - elsewhere
            for file in (blob, _part(blob), _note(blob))
        ]

    def remove(self, source: HubFile) -> bool:
        """Delete the file's entry, and its content where no other entry has it."""
        path, contents = self.locate(source), self.contents_of(source)
        removed = [remove_file(file) for file in (*([path] if path else []), *contents)]
        return any(removed)


def blob_sha256(path: Path) -> str | None:
    """The sha256 by which the cache names this file's content."""
    blob = _content(path)
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if named else None


def _content(path: Path) -> Path:
    """The blob behind an entry. It may be a link itself, to a content that repositories share."""
    with contextlib.suppress(OSError):  # no link
        path = path.parent / os.readlink(path)
    return _written_out(path)


def _written_out(path: Path) -> Path:
    """The path without links in its folders, so that two of one file are equal."""
    return path.parent.resolve() / path.name


def _part(blob: Path) -> Path:
    return blob.with_name(blob.name + PART)


def _note(blob: Path) -> Path:
    return blob.with_name(blob.name + PART + _NOTE)
