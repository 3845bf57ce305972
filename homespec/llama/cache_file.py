"""A context's cache as a file: taken up again only by the model that made it, and only whole.

What llama.cpp writes is followed by a line of JSON that names the model and holds a checksum, and
by the length of that line: llama.cpp itself checks shapes and types, not weights, and ends the
process over some kinds of damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

from homespec.disk import whole_file
from homespec.errors import RefusedError
from homespec.llama.context import Context
from homespec.llama.model import Model

_MAGIC = b"hscache1"
_TAIL_BYTES = len(_MAGIC) + 8
_BLOCK_BYTES = 1 << 20
_SAMPLES = 64


def save_cache(context: Context, path: Path) -> None:
    """Write the cache to `path`, or leave what is there. Raises DiskError."""
    with whole_file(path) as part:
        context.write_state(part)
        with part.open("r+b") as file:
            note = {"model": fingerprint(context.model), "tokens": len(context.tokens)}
            note |= {"bytes": part.stat().st_size, "crc32": _crc32(file)}
            line = json.dumps(note).encode()
            file.write(line + len(line).to_bytes(8, "little") + _MAGIC)
            file.flush()
            os.fsync(file.fileno())


def load_cache(context: Context, path: Path) -> None:
    """Fill the cache from `path`.

    Raises RefusedError for a file of another model, of other settings, or a damaged one; the
    cache is then empty.
    """
    context.clear()
    try:
        note = _note(path)
    except OSError as exc:
        raise RefusedError(f"{path} cannot be read: {exc.strerror}.") from exc
    if note is None:
        raise RefusedError(f"{path.name} is no whole cache file.")
    if note["model"] != fingerprint(context.model):
        raise RefusedError(f"{path.name} was made by another model.")
    if note["tokens"] > context.n_ctx:
        raise RefusedError(
            f"{path.name} holds {note['tokens']:,} tokens, the context only {context.n_ctx:,}."
        )
    context.read_state(path)


def fingerprint(model: Model) -> str:
    """Names a model by its size and by samples from all over its file: no gigabytes are read."""
    size = model.path.stat().st_size
    digest = hashlib.sha256(f"{model.size_bytes} {size}".encode())
    with model.path.open("rb") as file:
        digest.update(file.read(_BLOCK_BYTES))
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(4096))
    return digest.hexdigest()


def _note(path: Path) -> dict[str, Any] | None:
    """The line at the end; None for a file that is not whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL_BYTES:
            return None
        file.seek(size - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
        end = size - _TAIL_BYTES - int.from_bytes(tail[:8], "little")
        if tail[8:] != _MAGIC or end < 0:
            return None
        file.seek(end)
        try:
            note = json.loads(file.read(size - _TAIL_BYTES - end))
            whole = note["bytes"] == end and note["crc32"] == _crc32(file, end)
            return note if whole and {"model", "tokens"} <= note.keys() else None
        except (ValueError, KeyError, TypeError):
            return None


def _crc32(file: Any, length: int | None = None) -> int:
    """Of the first `length` bytes; the file is left behind the last byte read."""
    file.seek(0)
    left = os.fstat(file.fileno()).st_size if length is None else length
    value = 0
    while block := file.read(min(_BLOCK_BYTES, left)):
        value = zlib.crc32(block, value)
        left -= len(block)
    return value
