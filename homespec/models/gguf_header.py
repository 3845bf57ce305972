"""What a GGUF file says of the model in it, read from its header alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, LlamaFileType
from numpy.typing import NDArray

from homespec.errors import ModelError
from homespec.models import architectures
from homespec.models.byte_source import ByteSource, FileSource
from homespec.models.gguf_parser import (
    Cursor,
    StringArray,
    Tensor,
    Value,
    broken,
    padded,
    read_metadata,
    read_start,
    read_tensors,
)

MAX_LAYERS = 512  # llama.cpp's own limit


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a GGUF file says of itself. Properties raise ModelError where it says nonsense.

    source: the path or reference it came from. file_size and expected_file_size in bytes; the
    second is where the last tensor ends. For the shards of one model, see `join_shards`.
    """

    source: str
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int
    alignment: int
    file_size: int
    expected_file_size: int

    # -- any key --------------------------------------------------------------------------------

    def text(self, key: str) -> str | None:
        """The string under `key`, None where the key is missing."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a text")

    def flag(self, key: str) -> bool | None:
        """The truth value under `key`, None where the key is missing."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def integer(self, key: str, *, low: int = 0, high: int = 2**31 - 1) -> int | None:
        """The whole number under `key`, None where the key is missing."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise self._wrong(key, f"a whole number from {low} to {high}")

    def strings(self, key: str) -> StringArray | None:
        """The array of strings under `key`, None where the key is missing."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, StringArray):
            return value
        raise self._wrong(key, "a list of texts")

    def integers(self, key: str) -> NDArray[np.int64] | None:
        """The array of whole numbers (or truth values) under `key`, None where it is missing."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
            return value.astype(np.int64)
        raise self._wrong(key, "a list of whole numbers")

    def per_layer(self, key: str) -> tuple[int, ...] | None:
        """A whole number for each layer, where the file has one for all or a list of them."""
        if not isinstance(self.metadata.get(key), np.ndarray):
            value = self.integer(key)
            return None if value is None else (value,) * self.block_count
        values = self.integers(key)
        if values is None or len(values) != self.block_count or (values < 0).any():
            raise self._wrong(key, f"a number for each of the {self.block_count} layers")
        return tuple(int(value) for value in values)

    def of_architecture(self, key: str) -> str:
        """`context_length` -> `llama.context_length`."""
        return f"{self.architecture}.{key}"

    def _wrong(self, key: str, wanted: str) -> ModelError:
        return broken(self.source, f"its entry {key!r} is not {wanted}")

    def _required(self, key: str, *, high: int = 2**31 - 1) -> int:
        value = self.integer(self.of_architecture(key), low=1, high=high)
        if value is None:
            raise broken(self.source, f"it does not state its {key.replace('_', ' ')}")
        return value

    # -- the file -------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The model's own name."""
        return self.text("general.name")

    @property
    def file_type(self) -> str:
        """The quantization as people write it (`Q4_K_M`); unstated, the commonest tensor type."""
        number = self.integer("general.file_type")
        if number is not None and number in set(LlamaFileType):
            return str(LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_"))
        weights: dict[str, int] = {}
        for tensor in self.tensors:
            weights[tensor.type_name] = weights.get(tensor.type_name, 0) + tensor.n_bytes
        return max(weights, key=weights.__getitem__, default="none")

    @property
    def parameter_count(self) -> int:
        """The number of weights of all tensors."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def weights_bytes(self) -> int:
        """The bytes of all tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def split_count(self) -> int:
        """Into how many files the model is split; 1 for a whole one."""
        return self.integer("split.count", high=2**16 - 1) or 1

    @property
    def split_number(self) -> int:
        """Which of those files this is, from 0."""
        return self.integer("split.no", high=2**16 - 1) or 0

    @property
    def is_split(self) -> bool:
        """Whether this file holds only a part of the model."""
        return self.split_count > 1

    # -- the model ------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of network."""
        name = self.text("general.architecture")
        if not name:
            raise broken(self.source, "it does not state its architecture")
        return name

    @property
    def has_decoder(self) -> bool:
        """Whether it can write text token by token (encoders for embeddings cannot)."""
        causal = self.flag(self.of_architecture("attention.causal"))
        return architectures.writes_text(self.architecture) and causal is not False

    @property
    def cache_kind(self) -> architectures.CacheKind:
        """What the model keeps of the past; a recurrent state cannot drop its last tokens."""
        return architectures.cache_kind(self.architecture)

    @property
    def context_length(self) -> int:
        """The longest context it was trained for, in tokens."""
        return self._required("context_length")

    @property
    def block_count(self) -> int:
        """The number of layers."""
        return self._required("block_count", high=MAX_LAYERS)

    @property
    def embedding_length(self) -> int:
        """The width of the hidden state."""
        return self._required("embedding_length")

    @property
    def head_count(self) -> tuple[int, ...]:
        """Attention heads of each layer; 0 in a layer without attention."""
        return self.per_layer(self.of_architecture("attention.head_count")) or (
            (0,) * self.block_count
        )

    @property
    def head_count_kv(self) -> tuple[int, ...]:
        """Heads of each layer that keep keys and values."""
        heads = self.per_layer(self.of_architecture("attention.head_count_kv"))
        return self.head_count if heads is None else heads

    @property
    def key_length(self) -> int:
        """The elements of one head's key."""
        return self._head_length("attention.key_length")

    @property
    def value_length(self) -> int:
        """The elements of one head's value."""
        return self._head_length("attention.value_length")

    def _head_length(self, key: str) -> int:
        stated = self.integer(self.of_architecture(key))
        if stated is not None:
            return stated
        heads = self.head_count[0]  # like llama.cpp, which asks the first layer only
        return self.embedding_length // heads if heads else 0

    @property
    def sliding_window(self) -> int | None:
        """How many tokens back the sliding-window layers look, where that is stated."""
        return self.integer(self.of_architecture("attention.sliding_window"))

    @property
    def sliding_window_pattern(self) -> int | tuple[bool, ...] | None:
        """Every n-th layer looks at all, or for each layer whether it slides, where stated."""
        key = self.of_architecture("attention.sliding_window_pattern")
        if not isinstance(self.metadata.get(key), np.ndarray):
            return self.integer(key)
        return tuple(bool(slides) for slides in self.per_layer(key) or ())

    @property
    def recurrent_state(self) -> dict[str, int]:
        """The whole numbers stated about recurrent layers, like `ssm.state_size`."""
        prefix = self.of_architecture("")
        found = {}
        for key in self.metadata:
            short = key.removeprefix(prefix)
            if short != key and short.startswith(("ssm.", "wkv.", "kda.", "shortconv.")):
                value = self.metadata[key]
                if isinstance(value, int) and not isinstance(value, bool):
                    found[short] = self.integer(key) or 0
        return found

    # -- the tokenizer --------------------------------------------------------------------------

    @property
    def tokens(self) -> StringArray:
        """The pieces of the vocabulary; empty where the file has none."""
        return self.strings("tokenizer.ggml.tokens") or StringArray(b"", 0)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of a conversation."""
        return self.text("tokenizer.chat_template")


def read_header(source: str | Path | ByteSource) -> Header:
    """Read the header of a file or of any byte source.

    Raises UsageError for a path that leads nowhere, ModelError for what is no whole GGUF file.
    """
    if isinstance(source, (str, Path)):
        with FileSource(source) as file:
            return _parse(Cursor(file))
    return _parse(Cursor(source))


def join_shards(headers: Sequence[Header]) -> Header:
    """One header for a model split over files: the metadata of the first, the tensors of all.

    Its `data_offset` is the first file's; its sizes are sums.
    """
    first, count = headers[0], headers[0].split_count
    numbers = [header.split_number for header in headers]
    if numbers != list(range(count)) or any(header.split_count != count for header in headers):
        raise broken(
            first.source,
            f"it is split into {count} files, and these are numbers "
            f"{', '.join(str(number + 1) for number in numbers)}",
        )
    tensors = tuple(chain.from_iterable(header.tensors for header in headers))
    stated = first.integer("split.tensors.count")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise broken(first.source, "two of its files hold the same tensor")
    if stated is not None and stated != len(tensors):
        raise broken(first.source, f"its files hold {len(tensors)} tensors instead of {stated}")
    return replace(
        first,
        tensors=tensors,
        file_size=sum(header.file_size for header in headers),
        expected_file_size=sum(header.expected_file_size for header in headers),
    )


def _parse(cursor: Cursor) -> Header:
    version, num_tensors, num_keys = read_start(cursor)
    metadata = read_metadata(cursor, num_keys)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment.bit_count() != 1:
        raise cursor.broken(f"its alignment is {alignment}, which is no power of two")
    tensors = read_tensors(cursor, num_tensors, alignment)
    data_offset = padded(cursor.position, alignment) if tensors else cursor.position
    end = data_offset + (tensors[-1].offset + tensors[-1].n_bytes if tensors else 0)
    if cursor.source.size < end:
        raise ModelError(
            f"{cursor.source.name} is cut short: it has {cursor.source.size:,} bytes, "
            f"and its tensors need {end:,}.",
            hint="A download was probably interrupted; fetch it again.",
        )
    return Header(
        source=cursor.source.name,
        version=version,
        metadata=metadata,
        tensors=tensors,
        data_offset=data_offset,
        alignment=alignment,
        file_size=cursor.source.size,
        expected_file_size=end,
    )
