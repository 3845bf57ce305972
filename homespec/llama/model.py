"""A model's weights: loading, properties, closing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homespec.closing import Closing
from homespec.errors import ModelError, OutOfMemoryError, UsageError
from homespec.llama.devices import device_handle, offload_devices
from homespec.llama.interrupts import take_interrupt
from homespec.llama.library import clear_errors, last_error, library

LoadProgress = Callable[[float], bool | None]
"""Called with the loaded share, 0 to 1; returning False stops the load."""

ALL_LAYERS = -1


class Model(Closing):
    """The weights of a GGUF file in memory. Contexts made from it must be closed first."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gpu_layers: int = ALL_LAYERS,
        devices: list[str] | None = None,
        mmap: bool = True,
        mlock: bool = False,
        repack: bool = True,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load a model.

        gpu_layers: how many layers are placed on devices, ALL_LAYERS for all, 0 for the CPU alone.
        devices: names of the devices to use, None for all of them.
        repack: let the CPU keep a copy of the weights in its fastest layout.
        Raises ModelError for a file that holds no model llama.cpp can run, OutOfMemoryError.
        """
        self.path = Path(path)
        self._library = library()
        params = self._library.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = (2 if mlock else 0) | (1 if mmap else 0)
        params.use_extra_bufts = repack
        # llama.cpp reads both pointers during the load only.
        handles = self._device_handles(gpu_layers, devices)
        self.on_devices = gpu_layers != 0 and bool(offload_devices(devices))
        if handles is not None:
            params.devices = ctypes.addressof(handles)
        watch = _LoadWatch(progress)
        params.progress_callback = self._library.llama_progress_callback(watch)
        clear_errors()
        self._pointer = self._library.llama_model_load_from_file(os.fsencode(path), params)
        if watch.error is not None:
            self.close()
            raise watch.error
        if not self._pointer:
            raise KeyboardInterrupt if take_interrupt() else self._load_error()
        self.vocab = self._library.llama_model_get_vocab(self._pointer)
        self.n_vocab = int(self._library.llama_vocab_n_tokens(self.vocab))
        if not self._library.llama_model_has_decoder(self._pointer):
            self.close()
            raise ModelError(
                f"{self.path.name} is an encoder-only model: it embeds text, it writes none.",
                hint="Use a text-generating model (its card says causal or decoder).",
            )

    def _device_handles(self, gpu_layers: int, names: list[str] | None) -> Any:
        if gpu_layers == 0:
            chosen: list[Any] = []  # nothing offloaded, no device buffers either
        elif names is None:
            return None
        else:
            chosen = offload_devices(names)
            if not chosen:
                raise UsageError("No device was named to offload to.")
        # Terminated by NULL, as llama.cpp asks.
        return (ctypes.c_void_p * (len(chosen) + 1))(*map(device_handle, chosen), None)

    def _load_error(self) -> Exception:
        reason = last_error()
        if "alloc" in reason or "out of memory" in reason.lower():
            return OutOfMemoryError(
                f"There is not enough memory to load {self.path.name}: {reason}.",
                hint="Offload fewer layers with -ngl, or take a smaller quantization.",
            )
        if "unknown model architecture" in reason:
            return ModelError(
                f"{self.path.name} has an architecture this llama.cpp does not know: {reason}.",
                hint="It may need a newer homespec, or the file is no language model.",
            )
        return ModelError(
            f"llama.cpp could not load {self.path.name}: {reason or 'it gave no reason'}.",
            hint="Fetch the file again, or check it with `homespec check`.",
        )

    @property
    def pointer(self) -> Any:
        """The llama_model pointer."""
        return self._pointer

    @property
    def n_ctx_train(self) -> int:
        """The context length the model was trained for, in tokens."""
        return int(self._library.llama_model_n_ctx_train(self._pointer))

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return int(self._library.llama_model_n_layer(self._pointer))

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return int(self._library.llama_model_size(self._pointer))

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as llama.cpp puts it."""
        buffer = ctypes.create_string_buffer(256)
        self._library.llama_model_desc(self._pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state that cannot be cut at a token (Mamba and hybrids)."""
        return bool(
            self._library.llama_model_is_recurrent(self._pointer)
            or self._library.llama_model_is_hybrid(self._pointer)
        )

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template in the file, if any."""
        text = self._library.llama_model_chat_template(self._pointer, None)
        return text.decode("utf-8", "replace") if text else None

    def close(self) -> None:
        """Free the weights; once is enough, twice does no harm."""
        if self._pointer:
            self._library.llama_model_free(self._pointer)
            self._pointer = None


class _LoadWatch:
    """Passes progress on, and keeps what it raises: ctypes would swallow it (Ctrl-C too)."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self._progress = progress
        self.error: BaseException | None = None

    def __call__(self, share: float, _: object) -> bool:
        try:
            return self._progress is None or self._progress(float(share)) is not False
        except BaseException as exc:
            self.error = exc
            return False
