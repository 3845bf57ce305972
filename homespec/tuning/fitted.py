"""Requantized copies of drafts, kept in the cache folder beside a note of their parent."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from homespec import paths
from homespec.errors import DiskError
from homespec.llama.quantizer import quantize
from homespec.models.files import (
    locked,
    remembered_sha256,
    remove_file,
    require_free,
    sha256_of,
)
from homespec.models.gguf_header import read_header
from homespec.models.references import shard_names
from homespec.tuning.profile import FittedDraft, copies_in_use, write_json

_BITS = {"Q4_0": 4.5, "IQ4_NL": 4.5, "Q4_K": 5.5, "Q5_0": 5.5, "Q8_0": 8.5}
"""Bits a weight at most: a row that no K-block fits gets the next larger type."""


def digest_of(path: Path) -> str:
    """The sha256 of a model file; for a model in parts, that of the parts' digests."""
    digests = [remembered_sha256(path.with_name(name)) for name in shard_names(path.name)]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def fitted_draft(
    parent: Path,
    parent_sha256: str,
    quantization: str,
    *,
    progress: Callable[[float], None] | None = None,
) -> FittedDraft:
    """The copy of `parent` in that type, made unless it is there already.

    Raises DiskError, ModelError, CannotRunError.
    """
    folder = paths.cache_dir() / "fitted"
    path = folder / f"{parent.stem}-{quantization}-{parent_sha256[:12]}.gguf"
    with locked(path.with_suffix(".lock")):
        found = _existing(path, parent_sha256)
        return found or _make(parent, parent_sha256, quantization, path, progress)


def _existing(path: Path, parent_sha256: str) -> FittedDraft | None:
    """The copy at `path`, where its note says what it is and the file is as the note says."""
    try:
        note = json.loads(_note(path).read_text("utf-8"))
        if note["parent_sha256"] == parent_sha256 and note["size_bytes"] == path.stat().st_size:
            return FittedDraft(str(path), note["quantization"], note["sha256"], parent_sha256)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _make(
    parent: Path,
    parent_sha256: str,
    quantization: str,
    path: Path,
    progress: Callable[[float], None] | None,
) -> FittedDraft:
    what = f"A {quantization} copy of the draft"
    require_free(path.parent, copy_bytes(parent, quantization), what)
    quantize(parent, path, quantization, progress=progress)
    made = FittedDraft(str(path), quantization, sha256_of(path), parent_sha256)
    note = {
        "made_of": parent.name,
        "parent_sha256": parent_sha256,
        "quantization": quantization,
        "sha256": made.sha256,
        "size_bytes": path.stat().st_size,
    }
    write_json(_note(path), note)
    return made


def copy_bytes(parent: Path, quantization: str) -> int:
    """What a copy takes on the disk at most."""
    headers = [read_header(parent.with_name(name)) for name in shard_names(parent.name)]
    weights = sum(tensor.n_elements for header in headers for tensor in header.tensors)
    return headers[0].data_offset + int(weights * _BITS[quantization] / 8) + (16 << 20)


def drop_unused(parent_sha256: str, keep: FittedDraft | None = None) -> None:
    """Delete the copies of a draft that neither a kept profile, of whatever target, nor `keep` is.

    keep: the copy that a profile to come names.
    """
    used = copies_in_use() | ({Path(keep.path)} if keep else set())
    for copy in _copies("parent_sha256", parent_sha256):
        if copy not in used:
            _drop(copy)


def _drop(path: Path) -> None:
    for file in (path, _note(path), path.with_suffix(".lock")):
        with contextlib.suppress(DiskError):
            remove_file(file)


def drop_copies_of(name: str) -> None:
    """Delete all copies of a draft's file, by its name; its tuning makes them again."""
    for copy in _copies("made_of", name):
        _drop(copy)


def _copies(key: str, value: str) -> list[Path]:
    """The copies whose notes say that."""
    found = []
    for note in (paths.cache_dir() / "fitted").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(note.read_text("utf-8"))[key] == value:
                found.append(note.with_suffix(".gguf"))
    return found


def _note(path: Path) -> Path:
    return path.with_suffix(".json")
