"""The GGUF format, read within bounds: the start of a file, its metadata, its list of tensors.

Why not `GGUFReader` of the package `gguf`: it builds numpy views for every string of the
vocabulary, which took 12 seconds and half a gigabyte on a file with 152k tokens, it needs a
local file, and it believes every count and every nesting it reads. So this parser walks the
header itself, within bounds, and takes the package's tables of types and block sizes.

It is as strict as llama.cpp's own reader (which gives its caller no reasons): no key and no
tensor twice, arrays not nested, tensors in order without gap or overlap.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_VERSION, GGUFValueType
from numpy.typing import NDArray

from homespec.errors import ModelError
from homespec.models.byte_source import ByteSource

# A header of 262k tokens with 515k merges has 15 MB; the bounds leave three times that, and keep
# the worst a file can ask for under a second and 200 MB.
_MAX_HEADER_BYTES = 48 << 20
_MAX_KEYS = 1 << 14
_MAX_STRINGS = 1 << 21
_MAX_TENSORS = 1 << 15
_MAX_KEY_BYTES = 1 << 12
_MAX_NAME_BYTES = 63
_MAX_DIMENSIONS = 4
# A remote header of 6 MB takes three requests.
_FIRST_READ = 2 << 20
_LARGEST_READ = 4 << 20

_Type = GGUFValueType
_SCALARS = {
    int(_Type.UINT8): struct.Struct("<B"),
    int(_Type.INT8): struct.Struct("<b"),
    int(_Type.UINT16): struct.Struct("<H"),
    int(_Type.INT16): struct.Struct("<h"),
    int(_Type.UINT32): struct.Struct("<I"),
    int(_Type.INT32): struct.Struct("<i"),
    int(_Type.FLOAT32): struct.Struct("<f"),
    int(_Type.UINT64): struct.Struct("<Q"),
    int(_Type.INT64): struct.Struct("<q"),
    int(_Type.FLOAT64): struct.Struct("<d"),
    int(_Type.BOOL): struct.Struct("<?"),
}
_U32, _U64 = _SCALARS[_Type.UINT32], _SCALARS[_Type.UINT64]
# llama.cpp ends the process where one of these has another type.
_FIXED_TYPES = {
    "general.alignment": int(_Type.UINT32),
    "split.no": int(_Type.UINT16),
    "split.count": int(_Type.UINT16),
}
# Number of a tensor type -> its name, the elements of a block and the bytes of a block.
_TENSOR_TYPES = {
    42: ("Q2_0", 64, 18),  # of llama.cpp, not in every release of the package
    **{int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()},
}


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings, still as bytes: a vocabulary is mostly compared, seldom looked at.

    raw: for each string its length (8 bytes, little-endian) and its bytes.
    """

    raw: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        """The strings as they are; a piece of a vocabulary need not be UTF-8."""
        position, raw, length = 0, self.raw, _U64.unpack_from
        for _ in range(self.count):
            start = position + 8
            position = start + length(raw, position)[0]
            yield raw[start:position]

    def texts(self) -> list[str]:
        """The strings as text; bytes that are not UTF-8 become U+FFFD."""
        return [piece.decode("utf-8", "replace") for piece in self]


Value: TypeAlias = int | float | bool | str | StringArray | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: shape with the fastest dimension first, offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """The number of weights in it."""
        return math.prod(self.shape)


class Cursor:
    """Walks through a source from its start, reading ahead in large steps."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.data = bytearray()
        self.position = 0
        self.strings_left = _MAX_STRINGS

    def broken(self, why: str) -> ModelError:
        """The error for this source."""
        return broken(self.source.name, why)

    def require(self, length: int) -> None:
        """Have `length` bytes from the position in `data`."""
        end, held = self.position + length, len(self.data)
        if end <= held:
            return
        if end > self.source.size:
            raise ModelError(
                f"{self.source.name} is cut short: its {self.source.size:,} bytes end in the "
                "middle of its header.",
                hint="A download was probably interrupted; fetch it again.",
            )
        if end > _MAX_HEADER_BYTES:
            raise self.broken(f"its header claims more than {_MAX_HEADER_BYTES >> 20} MiB")
        wanted = max(end, min(2 * held, held + _LARGEST_READ), _FIRST_READ)
        wanted = min(wanted, self.source.size, _MAX_HEADER_BYTES)
        self.data += self.source.read(held, wanted - held)
        if len(self.data) < end:
            raise self.broken(f"it ended after {len(self.data):,} of {self.source.size:,} bytes")

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        """The numbers of a layout; a float or a bool where the layout has one."""
        self.require(layout.size)
        found = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return found

    def text(self, what: str, *, longest: int = _MAX_HEADER_BYTES, errors: str = "strict") -> str:
        """A string; ModelError where it is longer than `longest` bytes."""
        (length,) = self.take(_U64)
        if length > longest:
            raise self.broken(f"{what} claims a length of {length:,} bytes")
        self.require(length)
        raw = bytes(self.data[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError as exc:
            raise self.broken(f"{what} is not UTF-8: {raw[:40]!r}") from exc

    def strings(self, what: str, count: int) -> StringArray:
        """The `count` strings that follow."""
        if count > self.strings_left:
            raise self.broken(f"{what} claims {count:,} strings")
        self.strings_left -= count
        start = position = self.position
        data, last, length = self.data, len(self.data) - 8, _U64.unpack_from
        for _ in range(count):  # the one loop that runs for every token
            if position > last:
                self.position = position
                self.require(8)
                last = len(data) - 8
            position += 8 + length(data, position)[0]
        self.position = position
        self.require(0)
        return StringArray(bytes(data[start:position]), count)

    def numbers(self, what: str, kind: int, count: int) -> NDArray[np.generic]:
        """The `count` numbers of a type that follow, (count,)."""
        dtype = np.dtype(_SCALARS[kind].format)
        if count > _MAX_HEADER_BYTES:
            raise self.broken(f"{what} claims {count:,} numbers")
        self.require(count * dtype.itemsize)
        values: NDArray[np.generic] = np.frombuffer(self.data, dtype, count, self.position).copy()
        values.setflags(write=False)
        self.position += values.nbytes
        return values


def read_start(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of keys."""
    if cursor.source.size == 0:
        raise ModelError(f"{cursor.source.name} is empty.", hint="Fetch it again.")
    cursor.require(min(512, cursor.source.size))
    if cursor.data[:4] != b"GGUF":
        raise _not_gguf(cursor.source.name, bytes(cursor.data[:512]))
    cursor.position = 4
    (version,) = cursor.take(_U32)
    if version and version & 0xFFFF == 0:
        raise ModelError(
            f"{cursor.source.name} is a big-endian GGUF file, which this machine cannot run.",
            hint="Fetch the model's usual, little-endian file.",
        )
    if not 2 <= version <= GGUF_VERSION:
        raise ModelError(
            f"{cursor.source.name} is of GGUF version {version}; "
            f"versions 2 to {GGUF_VERSION} can be read.",
            hint="Fetch a newer file of this model." if version < 2 else "Update homespec.",
        )
    num_tensors, num_keys = cursor.take(struct.Struct("<QQ"))
    if num_tensors > _MAX_TENSORS:
        raise cursor.broken(f"it claims {num_tensors:,} tensors")
    if num_keys > _MAX_KEYS:
        raise cursor.broken(f"it claims {num_keys:,} entries of metadata")
    return version, num_tensors, num_keys


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """The `count` entries that follow."""
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"the name of metadata entry {index + 1}", longest=_MAX_KEY_BYTES)
        if not key or key in metadata:
            raise cursor.broken(
                f"its entry {key[:80]!r} stands there twice" if key else "an entry has no name"
            )
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: Cursor, key: str) -> Value:
    what = f"its entry {key[:80]!r}"
    (kind,) = cursor.take(_U32)
    if _FIXED_TYPES.get(key, kind) != kind:
        raise cursor.broken(f"{what} has the wrong type")
    if kind == _Type.STRING:
        return cursor.text(what, errors="replace")
    if kind != _Type.ARRAY:
        if kind not in _SCALARS:
            raise cursor.broken(f"{what} has the unknown type {kind}")
        return cursor.take(_SCALARS[kind])[0]
    (kind,) = cursor.take(_U32)
    (count,) = cursor.take(_U64)
    if kind == _Type.STRING:
        return cursor.strings(what, count)
    if kind not in _SCALARS:
        kinds = "lists" if kind == _Type.ARRAY else f"the unknown type {kind}"
        raise cursor.broken(f"{what} is a list of {kinds}")
    return cursor.numbers(what, kind, count)


_SHAPE = [struct.Struct(f"<{count}QIQ") for count in range(_MAX_DIMENSIONS + 1)]


def read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[Tensor, ...]:
    """The `count` tensors that follow, laid out as llama.cpp demands."""
    tensors: dict[str, Tensor] = {}
    end = 0
    for index in range(count):
        name = cursor.text(f"the name of tensor {index + 1}", longest=_MAX_NAME_BYTES)
        if name in tensors:
            raise cursor.broken(f"its tensor {name!r} stands there twice")
        (dimensions,) = cursor.take(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise cursor.broken(f"its tensor {name!r} has {dimensions:,} dimensions")
        *shape, kind, offset = cursor.take(_SHAPE[dimensions])
        if offset != end:
            raise cursor.broken(f"its tensor {name!r} starts at {offset:,} instead of {end:,}")
        tensors[name] = tensor = _tensor(cursor, name, tuple(shape), kind, offset)
        end = padded(offset + tensor.n_bytes, alignment)
    return tuple(tensors.values())


def _tensor(cursor: Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
    if kind not in _TENSOR_TYPES:
        raise ModelError(
            f"{cursor.source.name} cannot be run: its tensor {name!r} is of the unknown type "
            f"{kind}.",
            hint="It was made for another version of llama.cpp; look for a usual quantization.",
        )
    type_name, block_elements, block_bytes = _TENSOR_TYPES[kind]
    elements = math.prod(shape)
    if elements >= 2**63 or max(shape, default=0) >= 2**63:
        raise cursor.broken(f"its tensor {name!r} claims {elements:,} weights")
    if (shape[0] if shape else 1) % block_elements:
        raise cursor.broken(
            f"rows of its tensor {name!r} are no whole number of {type_name} blocks"
        )
    return Tensor(name, shape, type_name, offset, elements // block_elements * block_bytes)


def padded(size: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return (size + alignment - 1) // alignment * alignment


def broken(source: str, why: str) -> ModelError:
    """The error for a file that contradicts the format or itself."""
    return ModelError(
        f"{source} is no GGUF file that can be used: {why}.",
        hint="It is damaged or was made by a faulty tool; fetch it again, or another one.",
    )


# How a file that is no GGUF begins, and what to call it.
_LOOKS_LIKE = (
    (b"lmgg", "a model in the old GGML format, which llama.cpp no longer reads"),
    (b"fmgg", "a model in the old GGMF format, which llama.cpp no longer reads"),
    (b"tjgg", "a model in the old GGJT format, which llama.cpp no longer reads"),
    (b"algg", "an adapter in the old GGLA format, which llama.cpp no longer reads"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file it points to"),
    (b"PK\x03\x04", "a zip archive, or a PyTorch model, which is one"),
    (b"\x80\x02", "a Python pickle, as old PyTorch models are"),
    (b"\x89HDF", "an HDF5 file, as Keras models are"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"BZh", "a bzip2 archive"),
)


def _not_gguf(source: str, start: bytes) -> ModelError:
    text = start.lstrip().lower()
    kind = next((kind for magic, kind in _LOOKS_LIKE if start.startswith(magic)), None)
    if start[8:10] == b'{"':
        kind = "a safetensors model"
    elif text.startswith((b"<!doctype html", b"<html")):
        kind = "a web page; the download probably met a login or an error"
    elif text.startswith((b"<?xml", b"{")):
        kind = "a short answer of a server (XML or JSON), not a model"
    elif not start.strip(b"\0"):
        kind = "filled with zeros, as an interrupted download can be"
    looks = f": it looks like {kind}" if kind else ""
    return ModelError(
        f"{source} is not a GGUF file{looks}.",
        hint="Fetch the model's .gguf file, or convert the model to GGUF.",
    )
