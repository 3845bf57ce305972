"""A model's key-value cache: passes over many tokens, and taking them back."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homespec.closing import Closing
from homespec.errors import CannotRunError, DiskError, OutOfMemoryError, RefusedError, UsageError
from homespec.llama.devices import num_threads
from homespec.llama.library import clear_errors, last_error, library, note_pass
from homespec.llama.model import Model

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
"""ggml's numbers for the types a K or V cache may have."""

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

_NO_SLOT, _ABORTED = 1, 2


@dataclass(frozen=True, slots=True)
class ContextParams:
    """Settings of a context. Sizes in tokens; threads 0 means the physical cores.

    max_rows: the most tokens of one pass whose logits are asked for (draft depth + 1).
    sequences: how many share the n_ctx cells (homespec.llama.sequences).
    """

    n_ctx: int = 4096
    n_batch: int = 512
    max_rows: int = 33
    sequences: int = 1
    threads: int = 0
    threads_batch: int = 0
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    offload_kqv: bool = True
    snapshots: int = 0  # states a recurrent model keeps, so that as many tokens can be taken back

    def __post_init__(self) -> None:
        if self.flash_attention not in FLASH_ATTENTION:
            raise UsageError(
                f"Flash attention {self.flash_attention!r} is not one of on, off, auto."
            )
        for value in (self.cache_type_k, self.cache_type_v):
            if value not in CACHE_TYPES:
                raise UsageError(
                    f"{value!r} is no cache type.", hint=f"Known: {', '.join(CACHE_TYPES)}."
                )
        if self.n_ctx < 1:
            raise UsageError(f"The context must hold at least one token, not {self.n_ctx}.")


class LogitsRow:
    """The logits of one token of the last pass, in llama.cpp's own buffer: no copy is made."""

    __slots__ = ("context", "index")

    def __init__(self, context: Context, index: int) -> None:
        self.context = context
        self.index = index  # position in the batch

    @property
    def logits(self) -> NDArray[np.float32]:
        """(n_vocab,) view, valid until the next pass."""
        address = self.context.logits_address(self.index)
        return _view(address, self.context.model.n_vocab, np.float32)


class Context(Closing):
    """A cache of one sequence over a model's weights; keeps the CachedModel protocol."""

    def __init__(self, model: Model, params: ContextParams | None = None) -> None:
        """Allocate the cache and the compute buffers.

        Raises OutOfMemoryError, and UsageError for settings the model cannot have together.
        """
        params = params or ContextParams()
        self.model = model
        self.params = params
        self._library = library()
        self._tokens: list[int] = []
        clear_errors()
        note_pass()
        self.pointer = self._library.llama_init_from_model(model.pointer, self._native(params))
        if not self.pointer:
            raise self._init_error()
        self._memory = self._library.llama_get_memory(self.pointer)
        self._abort = ctypes.create_string_buffer(2)  # "" to go on, any text to stop
        self._library.llama_set_abort_callback(
            self.pointer, _abort_callback(), ctypes.cast(self._abort, ctypes.c_void_p)
        )
        self.n_ctx = min(int(self._library.llama_n_ctx(self.pointer)), params.n_ctx)
        self.n_batch = int(self._library.llama_n_batch(self.pointer))
        self._make_batch()
        self.can_truncate = not model.recurrent or self._probe_truncation()

    def _native(self, params: ContextParams) -> Any:
        native = self._library.llama_context_default_params()
        native.n_ctx = params.n_ctx
        native.n_batch = native.n_ubatch = min(params.n_batch, params.n_ctx)
        native.n_seq_max = params.sequences
        # One pool of cells: any lengths mix in a pass, and a prefix is shared, not copied.
        native.kv_unified = params.sequences > 1
        # Fewer rows than tokens: the logits of a whole batch would take n_batch x n_vocab floats.
        native.n_outputs_max = min(params.max_rows, native.n_batch)
        native.n_threads = params.threads or num_threads()
        native.n_threads_batch = params.threads_batch or native.n_threads
        native.flash_attn_type = FLASH_ATTENTION[params.flash_attention]
        native.type_k = CACHE_TYPES[params.cache_type_k]
        native.type_v = CACHE_TYPES[params.cache_type_v]
        native.offload_kqv = params.offload_kqv
        native.op_offload = params.offload_kqv
        # Without it a sliding-window cache forgets cells that a rollback needs again.
        native.swa_full = True
        native.n_rs_seq = params.snapshots
        native.no_perf = True
        return native

    def _init_error(self) -> Exception:
        reason = last_error()
        if "alloc" in reason or "memory" in reason.lower() or not reason:
            return OutOfMemoryError(
                f"There is not enough memory for a context of {self.params.n_ctx} tokens"
                f"{f': {reason}' if reason else ''}.",
                hint="Ask for a smaller context with -c, or a smaller cache type with -ctk/-ctv.",
            )
        return UsageError(
            f"llama.cpp refuses these settings: {reason}.",
            hint="A quantized V cache needs flash attention on (-fa on).",
        )

    def _make_batch(self) -> None:
        """One batch for all passes; views over its arrays are filled, not its elements."""
        self._batch = self._library.llama_batch_init(self.n_batch, 0, 1)

        def view(pointer: Any, dtype: Any) -> NDArray[Any]:
            return _view(ctypes.addressof(pointer.contents), self.n_batch, dtype)

        self._token = view(self._batch.token, np.int32)
        self._position = view(self._batch.pos, np.int32)
        self._wanted = view(self._batch.logits, np.int8)
        view(self._batch.n_seq_id, np.int32)[:] = 1
        for i in range(self.n_batch):
            self._batch.seq_id[i][0] = 0

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, in order; not to be changed."""
        return self._tokens

    def extend(self, tokens: Sequence[int], num_rows: int) -> list[LogitsRow]:
        """Append tokens; return a row for each of the last `num_rows` of them.

        More than a batch of tokens takes several passes; rows come from the last one.
        """
        if not tokens:
            return []
        before = len(self._tokens)
        if before + len(tokens) > self.n_ctx:
            raise AssertionError(f"{before} + {len(tokens)} tokens exceed n_ctx {self.n_ctx}")
        fresh = np.asarray(tokens, np.int32)
        if fresh.size and not (fresh.min() >= 0 and fresh.max() < self.model.n_vocab):
            raise UsageError(f"Token ids must lie between 0 and {self.model.n_vocab - 1}.")
        n = len(tokens)
        cuts = [*range(0, n, self.n_batch), n]
        if len(cuts) > 2:  # the last pass must hold all rows that are wanted
            cuts[-2] = min(cuts[-2], n - num_rows)
        try:
            for start, end in itertools.pairwise(cuts):
                self._pass(fresh[start:end], before + start, num_rows if end == n else 0)
        except BaseException:
            self._remove_from(before)
            raise
        if num_rows:  # a device may still be at work; its time belongs to this pass
            self._library.llama_synchronize(self.pointer)
        last = n - cuts[-2]
        self._tokens.extend(tokens)
        return [LogitsRow(self, i) for i in range(last - num_rows, last)]

    def _pass(self, tokens: NDArray[np.int32], position: int, num_rows: int) -> None:
        n = len(tokens)
        self._batch.n_tokens = n
        self._token[:n] = tokens
        self._position[:n] = np.arange(position, position + n)
        self._wanted[:n] = 0
        self._wanted[n - num_rows : n] = num_rows > 0
        self.decode(self._batch)

    def decode(self, batch: Any) -> None:
        """Evaluate a llama_batch; what fails leaves the cache to be cleaned by the caller.

        Raises KeyboardInterrupt where the pass was aborted, OutOfMemoryError, CannotRunError.
        """
        clear_errors()
        status = self._library.llama_decode(self.pointer, batch)
        if status != 0:
            raise self._pass_error(status)

    def _pass_error(self, status: int) -> BaseException:
        if status == _ABORTED:
            return KeyboardInterrupt()
        if status == _NO_SLOT:
            return CannotRunError("llama.cpp found no room in the cache for a pass.")
        reason = last_error() or f"code {status}"
        if "alloc" in reason or "memory" in reason.lower():
            return OutOfMemoryError(
                f"Memory ran short during a pass: {reason}.",
                hint="Use a smaller context (-c) or offload fewer layers (-ngl).",
            )
        return CannotRunError(f"llama.cpp failed during a pass: {reason}.")

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the cache.

        Raises RefusedError when the model cannot drop the rest; the cache is then cleared.
        """
        if not 0 <= length <= len(self._tokens):
            raise AssertionError(f"cannot keep {length} of {len(self._tokens)} tokens")
        if length == len(self._tokens):
            return
        removed = self._remove_from(length)
        del self._tokens[length:]
        if not removed:
            self.clear()
            raise RefusedError(
                "This model's cache cannot drop a part of its tokens.",
                hint="Decode it without speculation: --spec-type none.",
            )

    def clear(self) -> None:
        """Empty the cache."""
        self._library.llama_memory_clear(self._memory, False)
        self._tokens.clear()

    def write_state(self, path: Path) -> None:
        """Write the tokens and what the cache holds of them. Raises DiskError."""
        tokens = (ctypes.c_int32 * len(self._tokens))(*self._tokens)
        clear_errors()
        written = self._library.llama_state_seq_save_file(
            self.pointer, os.fsencode(path), 0, tokens, len(tokens)
        )
        if not written:
            raise DiskError(f"{path} cannot be written: {last_error() or 'llama.cpp failed'}.")

    def read_state(self, path: Path) -> None:
        """Take up what `write_state` wrote, of the same model and cache types.

        Raises RefusedError; the cache is then empty.
        """
        self.clear()
        tokens, count = (ctypes.c_int32 * self.n_ctx)(), ctypes.c_size_t()
        clear_errors()
        read = self._library.llama_state_seq_load_file(
            self.pointer, os.fsencode(path), 0, tokens, self.n_ctx, ctypes.byref(count)
        )
        if not read:
            self.clear()
            raise RefusedError(
                f"{path.name} does not fit this context: {last_error() or 'llama.cpp failed'}."
            )
        self._tokens.extend(tokens[: count.value])

    def _remove_from(self, position: int) -> bool:
        return bool(self._library.llama_memory_seq_rm(self._memory, 0, position, -1))

    def _probe_truncation(self) -> bool:
        """Whether two of four tokens can be taken back; leaves the cache empty."""
        self.extend([0, 0, 0, 0], 0)
        removed = self._remove_from(2)
        self.clear()
        return removed

    def abort(self) -> None:
        """End a pass under way on the CPU with KeyboardInterrupt; may be called by any thread."""
        self._abort.value = b"x"

    def resume(self) -> None:
        """Allow passes again."""
        self._abort.value = b""

    def logits_address(self, index: int) -> int:
        """Address of the logits of batch position `index`."""
        pointer = self._library.llama_get_logits_ith(self.pointer, index)
        if not pointer:
            raise AssertionError(f"the last pass kept no logits at {index}")
        return ctypes.addressof(pointer.contents)

    def set_threads(self, threads: int, threads_batch: int) -> None:
        """Threads for passes of one token, and of several."""
        self._library.llama_set_n_threads(self.pointer, threads, threads_batch)

    def close(self) -> None:
        """Free cache and buffers; once is enough, twice does no harm."""
        if self.pointer:
            self._library.llama_batch_free(self._batch)
            self._library.llama_free(self.pointer)
            self.pointer = None


@functools.cache
def _abort_callback() -> Any:
    """A C function of a pointer that is true when told to stop, asked at every node of a graph.

    strlen of the flag's text does it: a Python callback would cost two per cent of a pass.
    """
    strlen = ctypes.CDLL(None).strlen
    return ctypes.cast(strlen, library().ggml_abort_callback)


def _view(address: int, length: int, dtype: Any) -> NDArray[Any]:
    """An array over memory that llama.cpp owns."""
    size = length * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
