"""The hub's shared cache on the disk, as its documentation lays it out.

models--user--repo/refs/REVISION           the commit a branch or tag meant when asked
models--user--repo/snapshots/COMMIT/path   links into blobs/
models--user--repo/blobs/ETAG              contents; large files by their sha256
.locks/models--user--repo/ETAG.lock        who brings a content holds this
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from homespec.models.files import PART, locked, remove_file
from homespec.models.references import HubFile

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
        """Where the file is at hand, also under another revision with the pinned content."""
        path = self.snapshot(source.revision) / source.path
        if path.is_file():
            return path
        if source.sha256 is None:
            return None
        others = (self.folder / "snapshots").glob(f"*/{source.path}")
        return next((o for o in others if o.is_file() and blob_sha256(o) == source.sha256), None)

    @contextlib.contextmanager
    def lock(self, etag: str) -> Iterator[None]:
        """The very lock that other tools take to bring this content."""
        with locked(self.root / ".locks" / self.folder.name / f"{etag}.lock"):
            yield

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
        """The blob behind a file and its unfinished download; none where another entry has it."""
        path = self.locate(source)
        if path is not None:
            blob = path.resolve()
            links = (p for p in (self.folder / "snapshots").rglob("*") if p.is_symlink())
            if any(link != path and link.resolve() == blob for link in links):
                return []
        elif source.sha256 is not None:
            blob = self.blob(source.sha256)
        else:
            return []
        return [blob, blob.with_name(blob.name + PART)]

    def remove(self, source: HubFile) -> bool:
        """Delete the file's entry, and its content where no other entry has it."""
        path, contents = self.locate(source), self.contents_of(source)
        if path is not None:
            path.unlink()
        removed = [remove_file(file) for file in contents]
        return any(removed) or path is not None


def blob_sha256(path: Path) -> str | None:
    """The sha256 by which the cache names this file's content."""
    blob = path.resolve()
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if named else None
