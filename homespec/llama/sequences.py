"""Many sequences over one cache: passes that carry tokens of several of them, and shared prefixes.

The cache is one pool of cells. A sequence takes as many as it has tokens; tokens that two
sequences begin with alike can lie in the same cells, and are evaluated once.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from homespec.closing import Closing
from homespec.errors import RefusedError, UsageError
from homespec.llama.context import Context, ContextParams, LogitsRow
from homespec.llama.library import library
from homespec.llama.model import Model

MAX_SEQUENCES = 256
"""llama.cpp's limit for one cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that a pass appends to a sequence, with a row for each of the last `num_rows`."""

    sequence: CachedSequence
    tokens: Sequence[int]
    num_rows: int


class SequenceCache(Closing):
    """The cells of a cache, and the sequences in them. Close it, or use it in a `with` block."""

    def __init__(self, model: Model, params: ContextParams) -> None:
        """Allocate the cells (params.n_ctx) for params.sequences sequences.

        Raises OutOfMemoryError, and UsageError for settings the model cannot have together.
        """
        if not 2 <= params.sequences <= MAX_SEQUENCES:
            raise UsageError(
                f"A cache is shared by 2 to {MAX_SEQUENCES} sequences, not {params.sequences}."
            )
        self.context = Context(model, params)
        self.model = model
        self.num_cells = self.context.n_ctx
        self.n_batch = self.context.n_batch
        self.max_rows = min(params.max_rows, self.n_batch)
        self.can_truncate = self.context.can_truncate
        self._library = library()
        self._memory = self._library.llama_get_memory(self.context.pointer)
        self._free_ids = list(range(params.sequences))
        self._open: dict[int, CachedSequence] = {}
        self._cells = itertools.count()
        self._make_batch()

    def _make_batch(self) -> None:
        """A llama_batch over arrays of our own, filled anew for each pass."""
        n = self.n_batch
        self._token = np.zeros(n, np.int32)
        self._position = np.zeros(n, np.int32)
        self._wanted = np.zeros(n, np.int8)
        self._sequence = np.zeros(n, np.int32)
        self._counts = np.ones(n, np.int32)
        addresses = self._sequence.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._pointers: NDArray[np.uintp] = addresses
        batch = self._library.llama_batch()
        fields = dict(batch._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._position),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._wanted),
        ):
            setattr(batch, name, ctypes.cast(array.ctypes.data, fields[name]))
        self._batch = batch

    @property
    def num_free(self) -> int:
        """Cells that hold nothing."""
        return self.num_cells - num_held(self._open.values())

    def open(self, n_ctx: int) -> CachedSequence:
        """An empty sequence that may hold `n_ctx` tokens."""
        if not self._free_ids:
            raise AssertionError("all sequences are in use")
        sequence = CachedSequence(self, self._free_ids.pop(0), min(n_ctx, self.num_cells))
        self._open[sequence.number] = sequence
        return sequence

    def extend(self, blocks: Sequence[Block]) -> list[list[LogitsRow]]:
        """Append tokens to several sequences in one pass; rows by block, valid until the next.

        On an exception no sequence is changed. At most n_batch tokens and max_rows rows.
        """
        rows: list[list[LogitsRow]] = []
        total = wanted = 0
        for block in blocks:
            n, before = len(block.tokens), len(block.sequence.tokens)
            if not 0 <= block.num_rows <= n or before + n > block.sequence.n_ctx:
                raise AssertionError(f"{before} + {n} tokens, {block.num_rows} rows: do not fit")
            at = slice(total, total + n)
            total, wanted = total + n, wanted + block.num_rows
            if total > self.n_batch:
                raise AssertionError(f"more than {self.n_batch} tokens in a pass")
            if wanted > self.max_rows:  # llama.cpp would abort
                raise AssertionError(f"more than {self.max_rows} rows in a pass")
            self._token[at] = block.tokens
            self._position[at] = np.arange(before, before + n)
            self._sequence[at] = block.sequence.number
            self._wanted[at] = 0
            self._wanted[total - block.num_rows : total] = 1
            rows.append([LogitsRow(self.context, i) for i in range(total - block.num_rows, total)])
        if not total:
            return rows
        fresh = self._token[:total]
        if not (fresh.min() >= 0 and fresh.max() < self.model.n_vocab):
            raise UsageError(f"Token ids must lie between 0 and {self.model.n_vocab - 1}.")
        self._batch.n_tokens = total
        try:
            self.context.decode(self._batch)
            self._library.llama_synchronize(self.context.pointer)  # a device may still be at work
        except BaseException:
            for block in blocks:
                self._remove(block.sequence.number, len(block.sequence.tokens))
            raise
        for block in blocks:
            block.sequence.appended(block.tokens, itertools.islice(self._cells, len(block.tokens)))
        return rows

    def _remove(self, number: int, position: int) -> bool:
        return bool(self._library.llama_memory_seq_rm(self._memory, number, position, -1))

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """As CachedSequence.truncate."""
        if not self._remove(sequence.number, length if length else -1):
            self._remove(sequence.number, -1)
            sequence.cut(0)
            raise RefusedError(
                "This model's cache cannot drop a part of its tokens.",
                hint="Decode it without speculation: --spec-type none.",
            )
        sequence.cut(length)

    def share(self, source: CachedSequence, target: CachedSequence, length: int) -> None:
        """As CachedSequence.share."""
        self._library.llama_memory_seq_cp(self._memory, source.number, target.number, 0, length)

    def close_sequence(self, sequence: CachedSequence) -> None:
        """As CachedSequence.close."""
        if self._open.pop(sequence.number, None) is sequence:
            if self.context.pointer:
                self._remove(sequence.number, -1)
            self._free_ids.append(sequence.number)

    def close(self) -> None:
        """Free cells and buffers; once is enough, twice does no harm."""
        self.context.close()


class CachedSequence:
    """One sequence of a cache; keeps the CachedModel protocol.

    cells: a number for the cell of each token. shares: whether some may be another's too.
    """

    def __init__(self, cache: SequenceCache, number: int, n_ctx: int) -> None:
        self._cache = cache
        self.number = number
        self.n_ctx = n_ctx
        self.cells: list[int] = []
        self.shares = False
        self._tokens: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, in order; not to be changed."""
        return self._tokens

    def extend(self, tokens: Sequence[int], num_rows: int) -> list[LogitsRow]:
        """Append tokens in a pass of their own, at most n_batch."""
        [rows] = self._cache.extend([Block(self, tokens, num_rows)])
        return rows

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises RefusedError when the model cannot drop the rest; the sequence is then empty.
        """
        if not 0 <= length <= len(self._tokens):
            raise AssertionError(f"cannot keep {length} of {len(self._tokens)} tokens")
        if length < len(self._tokens):
            self._cache.truncate(self, length)

    def share(self, source: CachedSequence, length: int) -> None:
        """Begin, while empty, with the first `length` tokens of `source`, in the same cells."""
        if self._tokens or not 0 < length <= len(source.tokens):
            raise AssertionError("only an empty sequence takes up what another one holds")
        self._cache.share(source, self, length)
        self.appended(source.tokens[:length], source.cells[:length])
        self.shares = source.shares = True

    def appended(self, tokens: Sequence[int], cells: Iterable[int]) -> None:
        """Note what the cache took in."""
        self._tokens.extend(tokens)
        self.cells.extend(cells)

    def cut(self, length: int) -> None:
        """Note what the cache dropped."""
        del self._tokens[length:]
        del self.cells[length:]

    def close(self) -> None:
        """Give the cells and the number back."""
        self._cache.close_sequence(self)


def num_held(sequences: Collection[CachedSequence]) -> int:
    """Cells that these sequences hold; what they share is counted once."""
    held = [sequence.cells for sequence in sequences]
    if any(sequence.shares for sequence in sequences):
        return len(set().union(*held))
    return sum(map(len, held))
