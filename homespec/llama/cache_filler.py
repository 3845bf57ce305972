"""Fills a cache with copies of a few real cells, so that a deep context costs no prompt pass.

What a pass costs depends on how many cells it looks at, not on what they say. The state that
llama.cpp saves for a sequence (`llama_state_seq_get_data`) lists its cells and then their keys and
values, layer by layer; here it is read after a short prompt, repeated, and given back.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from homespec.llama.context import Context
from homespec.llama.library import library

_SEED_CELLS = 16
_CELL = struct.Struct("<iIi")  # position, number of sequences, the sequence


def fill(context: Context, length: int) -> bool:
    """Have the cache hold `length` tokens; whether it was done by copying.

    Where a cache is laid out in a way not known here (recurrent layers, pictures), the tokens are
    decoded. What was in the cache before is gone. The tokens mean nothing.
    """
    rng = np.random.default_rng(0)
    # The first ids of many vocabularies are bytes and markers, the last ones control tokens.
    tokens = rng.integers(0, min(context.model.n_vocab, 20_000), length).tolist()
    context.clear()
    context.extend(tokens[:_SEED_CELLS], 0)
    if length <= _SEED_CELLS:
        return True
    repeated = _repeat(_saved(context), length)
    if repeated is not None and _restored(context, repeated):
        context.tokens.extend(tokens[_SEED_CELLS:])
        return True
    context.clear()
    context.extend(tokens, 0)
    return False


def _saved(context: Context) -> bytes:
    lib = library()
    size = lib.llama_state_seq_get_size(context.pointer, 0)
    buffer = (ctypes.c_uint8 * size)()
    written = lib.llama_state_seq_get_data(context.pointer, buffer, size, 0)
    return bytes(buffer)[:written]


def _restored(context: Context, state: bytes) -> bool:
    buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    return bool(library().llama_state_seq_set_data(context.pointer, buffer, len(state), 0))


class _Reader:
    """Walks over a saved state."""

    def __init__(self, state: bytes) -> None:
        self.state, self.at = state, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.state):
            raise ValueError("the state ends too early")
        self.at += size
        return self.state[self.at - size : self.at]

    def number(self, layout: str = "<I") -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])


def _repeat(state: bytes, length: int) -> bytes | None:
    """The state with its cells repeated up to `length`; None where it is laid out otherwise."""
    reader = _Reader(state)
    try:
        parts = [reader.take(8)]  # a magic number, the sequence
        while reader.at < len(state):
            parts += _repeat_cache(reader, length)
    except (ValueError, struct.error):
        return None
    return b"".join(parts)


def _repeat_cache(reader: _Reader, length: int) -> list[bytes]:
    """One cache; a model with a sliding window has two."""
    cells = reader.take(8)
    if struct.unpack("<II", cells) != (1, _SEED_CELLS):
        raise ValueError("not one stream with the cells that were decoded")
    parts = [struct.pack("<II", 1, length)]
    for i in range(_SEED_CELLS):
        if _CELL.unpack(reader.take(_CELL.size)) != (i, 1, 0):
            raise ValueError("cells carry more than their position")
    parts += [_CELL.pack(i, 1, 0) for i in range(length)]
    transposed, layers = reader.number(), reader.number()
    parts.append(struct.pack("<II", transposed, layers))
    for _ in range(layers):  # keys: type, bytes of a row, rows
        parts += _repeat_rows(reader, length)
    for _ in range(layers):
        parts += (_repeat_columns if transposed else _repeat_rows)(reader, length)
    return parts


def _repeat_rows(reader: _Reader, length: int) -> list[bytes]:
    head = reader.take(4)
    row = reader.number("<Q")
    rows = reader.take(row * _SEED_CELLS)
    copies = -(-length // _SEED_CELLS)
    return [head, struct.pack("<Q", row), (rows * copies)[: row * length]]


def _repeat_columns(reader: _Reader, length: int) -> list[bytes]:
    """Values kept by channel: type, bytes of an element, channels, then each one's cells."""
    head = reader.take(4)
    size, channels = reader.number(), reader.number()
    data = np.frombuffer(reader.take(size * channels * _SEED_CELLS), np.uint8)
    columns = data.reshape(channels, _SEED_CELLS * size)
    copies = -(-length // _SEED_CELLS)
    repeated = np.tile(columns, copies)[:, : length * size]
    return [head, struct.pack("<II", size, channels), repeated.tobytes()]
