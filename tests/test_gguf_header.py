"""The header reader against real files, damaged files, and files made to hurt it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from homespec.errors import HomespecError, ModelError, UsageError
from homespec.models import gguf_parser, sources
from homespec.models.architectures import CacheKind
from homespec.models.byte_source import FileSource
from homespec.models.catalog import load_catalog
from homespec.models.gguf_header import Header, join_shards, read_header
from homespec.models.gguf_parser import StringArray, Value
from homespec.models.text_model import require_text_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import fastest
from tests.tiny_gguf import CHAT_TEMPLATE, tokenizer_metadata, write_tiny_gguf

PROPERTIES = [name for name, kind in vars(Header).items() if isinstance(kind, property)]
MAX_SECONDS = 1.0
MAX_BYTES = 200e6
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
STRING, ARRAY = U32(8), U32(9)


class Memory:
    """Bytes as a source that keeps account of the requests."""

    name = "memory"

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.requests: list[int] = []

    def read(self, offset: int, length: int) -> bytes:
        self.requests.append(length)
        return self.data[offset : offset + length]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return U64(len(raw)) + raw


def entry(key: str | bytes, value: bytes) -> bytes:
    return text(key) + value


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(U64(size) for size in shape)
    return text(name) + U32(len(shape)) + sizes + U32(kind) + U64(offset)


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    data: bytes = bytes(4096),
) -> bytes:
    """A GGUF file from raw parts; the counts may lie."""
    entries, tensors = entries or [], tensors or []
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + data


def plain(value: Value) -> object:
    """A value as lists, texts and numbers."""
    if isinstance(value, StringArray):
        return value.texts()
    return value.tolist() if isinstance(value, np.ndarray) else value


def touch(header: Header) -> None:
    """Look at everything; every complaint has to be a HomespecError."""
    for name in PROPERTIES:
        with contextlib.suppress(HomespecError):
            getattr(header, name)
    header.tokens.texts()
    require_text_model(header)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", vocab_size=2000)


def real_files() -> Iterator[Path]:
    """The models that are on this machine anyway."""
    folder = os.environ.get("HOMESPEC_TEST_PAIR")
    if folder:
        yield from sorted(Path(folder).glob("*.gguf"))
    starter = sources.locate(load_catalog().get("starter").target.source)
    if starter:
        yield starter


# -- what it reads -----------------------------------------------------------------------------


def test_agrees_with_the_reader_of_the_gguf_package(tiny: Path) -> None:
    header, reader = read_header(tiny), gguf.GGUFReader(tiny)
    assert header.version == reader.fields["GGUF.version"].contents()
    assert header.alignment == reader.alignment
    assert header.data_offset == reader.data_offset
    assert header.file_size == tiny.stat().st_size
    assert header.expected_file_size <= header.file_size
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, value in header.metadata.items():
        assert plain(value) == fields[key].contents(), key
    assert [
        (t.name, t.shape, t.type_name, header.data_offset + t.offset, t.n_bytes, t.n_elements)
        for t in header.tensors
    ] == [
        (t.name, tuple(t.shape), t.tensor_type.name, t.data_offset, t.n_bytes, t.n_elements)
        for t in reader.tensors
    ]


def test_tells_what_the_model_is(tiny: Path) -> None:
    header, parameters = read_header(tiny), gguf.GGUFReader(tiny).tensors
    assert header.architecture == "llama"
    assert header.file_type == "F32"
    assert header.name == "tiny random llama"
    assert header.parameter_count == sum(int(t.n_elements) for t in parameters)
    assert header.weights_bytes == 4 * header.parameter_count
    assert (header.context_length, header.block_count, header.embedding_length) == (512, 2, 64)
    assert (header.head_count, header.head_count_kv) == ((2, 2), (1, 1))
    assert (header.key_length, header.value_length) == (32, 32)
    assert header.chat_template == CHAT_TEMPLATE
    assert header.tokens.texts() == tokenizer_metadata(2000)["tokenizer.ggml.tokens"]
    assert (header.is_split, header.has_decoder) == (False, True)
    assert header.cache_kind is CacheKind.ATTENTION
    assert (header.sliding_window, header.recurrent_state) == (None, {})
    require_text_model(header)


def test_reads_what_a_memory_plan_needs(tmp_path: Path) -> None:
    header = read_header(
        write_tiny_gguf(
            tmp_path / "a.gguf",
            architecture="qwen35",
            metadata={
                "qwen35.attention.head_count_kv": [1, 0],
                "qwen35.attention.key_length": 48,
                "qwen35.attention.sliding_window": 1024,
                "qwen35.attention.sliding_window_pattern": [True, False],
                "qwen35.ssm.state_size": 16,
                "qwen35.ssm.conv_kernel": 4,
                "general.file_type": None,
            },
        )
    )
    assert header.head_count_kv == (1, 0)
    assert (header.key_length, header.value_length) == (48, 32)
    assert header.sliding_window == 1024
    assert header.sliding_window_pattern == (True, False)
    assert header.recurrent_state == {"ssm.state_size": 16, "ssm.conv_kernel": 4}
    assert header.cache_kind is CacheKind.HYBRID
    assert header.file_type == "F32"


@pytest.mark.parametrize("first_read", [1, 7, 100, 5000])
def test_reading_in_steps_changes_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, first_read: int
) -> None:
    whole = read_header(tiny)
    monkeypatch.setattr(gguf_parser, "_FIRST_READ", first_read)
    source = Memory(tiny.read_bytes())
    assert read_header(source).tensors == whole.tensors
    assert sum(source.requests) < 2 * whole.data_offset + 512
    assert len(source.requests) > 1


def test_a_remote_header_takes_few_requests(tiny: Path) -> None:
    source = Memory(tiny.read_bytes())
    read_header(source)
    assert len(source.requests) == 1


@pytest.mark.skipif(not list(real_files()), reason="no real model at hand")
@pytest.mark.parametrize("path", list(real_files()), ids=lambda path: path.name)
def test_real_files_are_read_fast(path: Path) -> None:
    header = read_header(path)
    assert fastest(lambda: read_header(path), within=0.3) < 0.3
    assert header.expected_file_size == header.file_size
    require_text_model(header)


def test_shards_are_joined(tmp_path: Path) -> None:
    whole = read_header(write_tiny_gguf(tmp_path / "whole.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=8)
    writer.add_block_count(2)
    for one in whole.tensors:
        writer.add_tensor(one.name, np.zeros(one.shape[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = [read_header(path) for path in sorted(tmp_path.glob("part-*.gguf"))]
    assert [shard.split_number for shard in shards] == list(range(len(shards)))
    assert shards[0].split_count == len(shards) > 1
    joined = join_shards(shards)
    assert joined.weights_bytes == whole.weights_bytes
    assert {t.name for t in joined.tensors} == {t.name for t in whole.tensors}
    assert joined.block_count == 2
    for wrong in (shards[1:], shards[::-1], shards[:1], [*shards, shards[0]]):
        with pytest.raises(ModelError, match="split into"):
            join_shards(wrong)
    with pytest.raises(ModelError, match="only part 2 of"):
        require_text_model(shards[1])


# -- what it refuses ---------------------------------------------------------------------------


def test_paths_that_lead_nowhere(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    cases = {
        tmp_path / "none.gguf": "There is no file",
        tmp_path / "folder": "is a folder",
        tmp_path / "fifo": "no regular file",
        tiny / "below": "cannot be opened",
        Path("nul\0byte"): "cannot be opened",
        Path("x" * 5000): "cannot be opened",
    }
    for path, message in cases.items():
        with pytest.raises(UsageError, match=message) as caught:
            read_header(path)
        assert caught.value.hint
    with pytest.raises(UsageError) as caught:
        read_header(tiny.parent)
    assert tiny.name in str(caught.value.hint)


@pytest.mark.parametrize(
    ("start", "looks_like"),
    [
        (b"", "is empty"),
        (b'\x10\0\0\0\0\0\0\0{"a":{}}', "safetensors"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<html><body>Not found", "web page"),
        (b"<?xml version='1.0'?><Error>", "answer of a server"),
        (b'{"error": "gated"}', "answer of a server"),
        (b"version https://git-lfs\noid sha256:00", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "zip"),
        (b"lmgg" + bytes(100), "old GGML"),
        (b"fmgg" + bytes(100), "old GGMF"),
        (b"tjgg" + bytes(100), "old GGJT"),
        (b"algg" + bytes(100), "GGLA"),
        (b"\x1f\x8b\x08", "gzip"),
        (bytes(1000), "filled with zeros"),
        (b"any other text", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
    ],
)
def test_says_what_another_file_looks_like(start: bytes, looks_like: str) -> None:
    with pytest.raises(ModelError, match=looks_like):
        read_header(Memory(start))


def test_a_cut_header_is_told_at_every_length(tiny: Path) -> None:
    data, header = tiny.read_bytes(), read_header(tiny)
    lengths = [*range(4, 2000), *range(2000, header.data_offset, 997)]
    for length in lengths:
        with pytest.raises(ModelError, match="middle of its header"):
            read_header(Memory(data[:length]))


def test_cut_tensor_data_is_told_with_both_sizes(tiny: Path) -> None:
    data, header = tiny.read_bytes(), read_header(tiny)
    for length in (header.data_offset, header.expected_file_size - 1):
        with pytest.raises(ModelError) as caught:
            read_header(Memory(data[:length]))
        assert f"{length:,} bytes" in caught.value.message
        assert f"{header.expected_file_size:,}" in caught.value.message
    assert read_header(Memory(data[: header.expected_file_size])).tensors == header.tensors


def test_a_file_that_shrinks_while_it_is_read(tiny: Path) -> None:
    data = tiny.read_bytes()
    with pytest.raises(ModelError, match="ended after"):
        read_header(Memory(data[:3000], size=len(data)))


def test_a_big_endian_file_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="big-endian"):
        read_header(tmp_path / "big.gguf")


LIE = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "version 0": (build(version=0), "version 0"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "number of entries": (build(num_entries=LIE), "claims"),
    "number of entries, small lie": (build([entry("a", U32(0) + b"x")], num_entries=9), "no name"),
    "number of tensors": (build(num_tensors=LIE), "claims"),
    "length of a key": (build([U64(LIE) + b"x"]), "claims a length"),
    "length of a text": (build([entry("a", STRING + U64(LIE))]), "claims a length"),
    "length of a list": (build([entry("a", ARRAY + U32(4) + U64(LIE))]), "claims"),
    "length of a list of texts": (build([entry("a", ARRAY + STRING + U64(LIE))]), "claims"),
    "length within a list of texts": (
        build([entry("a", ARRAY + STRING + U64(2) + text("x") + U64(2**64 - 1))]),
        "middle of its header",
    ),
    "no key": (build([entry("", U32(0) + b"x")]), "no name"),
    "key that is not UTF-8": (build([entry(b"\xff\xfe", U32(0) + b"x")]), "not UTF-8"),
    "key twice": (build([entry("a", U32(0) + b"x")] * 2), "twice"),
    "unknown type": (build([entry("a", U32(13) + b"x")]), "unknown type 13"),
    "unknown type in a list": (build([entry("a", ARRAY + U32(99) + U64(1))]), "unknown type 99"),
    "nested lists": (build([entry("a", ARRAY + (ARRAY + U64(1)) * 5000)]), "list of lists"),
    "alignment of another type": (
        build([entry("general.alignment", STRING + text("32"))]),
        "wrong type",
    ),
    "split number of another type": (build([entry("split.no", U32(4) + U32(0))]), "wrong type"),
    "alignment 0": (build([entry("general.alignment", U32(4) + U32(0))]), "power of two"),
    "alignment 24": (build([entry("general.alignment", U32(4) + U32(24))]), "power of two"),
    "alignment 2 GiB": (
        build([entry("general.alignment", U32(4) + U32(2**31))], [tensor("a", (8,), 0, 0)]),
        "cut short",
    ),
    "name of a tensor": (build(tensors=[tensor("x" * 64, (8,), 0, 0)]), "claims a length"),
    "name of a tensor that is not UTF-8": (
        build(tensors=[tensor(b"\xff", (8,), 0, 0)]),
        "not UTF-8",
    ),
    "tensor twice": (
        build(tensors=[tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)]),
        "twice",
    ),
    "five dimensions": (build(tensors=[tensor("a", (1,) * 5, 0, 0)]), "5 dimensions"),
    "2^32 dimensions": (build(tensors=[text("a") + U32(2**32 - 1)]), "dimensions"),
    "shape beyond all bounds": (build(tensors=[tensor("a", (2**62, 4), 0, 0)]), "claims"),
    "dimension below zero": (build(tensors=[tensor("a", (2**64 - 1, 0), 0, 0)]), "claims"),
    "tensor larger than the file": (build(tensors=[tensor("a", (2**40,), 0, 0)]), "cut short"),
    "rows of half a block": (build(tensors=[tensor("a", (48,), 2, 0)]), "Q4_0 blocks"),
    "unknown tensor type": (build(tensors=[tensor("a", (32,), 4, 0)]), "unknown type 4"),
    "tensors one over the other": (
        build(tensors=[tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)]),
        "starts at 0 instead of 32",
    ),
    "tensors in a circle": (
        build(tensors=[tensor("a", (8,), 0, 32), tensor("b", (8,), 0, 0)]),
        "starts at 32 instead of 0",
    ),
    "tensor at the end of all numbers": (
        build(tensors=[tensor("a", (8,), 0, 2**64 - 32)]),
        "instead of 0",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_values_end_in_a_sentence(case: str) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(ModelError, match=message) as caught:
        read_header(Memory(data))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def largest(kind: str) -> bytes:
    """Headers that stay just within every bound, or burst it as late as they can."""
    many = 1 << 20
    builders = {
        "texts": lambda: build(
            [entry(k, ARRAY + STRING + U64(many) + bytes(8 * many)) for k in "ab"]
        ),
        "numbers": lambda: build([entry("a", ARRAY + U32(11) + U64(5 * many) + bytes(40 * many))]),
        "one text": lambda: build([entry("a", STRING + text(bytes(40 * many)))]),
        "keys": lambda: build([entry(f"{i}", U32(7) + b"x") for i in range(1 << 14)]),
        "long keys": lambda: build([entry(f"{i:4000}", U32(7) + b"x") for i in range(10000)]),
        "tensors": lambda: build(
            tensors=[tensor(f"{i:63}", (1, 1, 1, 8), 0, 32 * i) for i in range(1 << 15)],
            data=bytes(32 << 15),
        ),
        "beyond": lambda: build([entry("a", STRING + text(bytes(49 * many)))]),
        "growing": lambda: build([entry(f"{i}", STRING + text(bytes(many))) for i in range(60)]),
    }
    return builders[kind]()


@pytest.mark.parametrize(
    "kind",
    ["texts", "numbers", "one text", "keys", "long keys", "tensors", "beyond", "growing"],
)
def test_the_worst_header_costs_little(kind: str) -> None:
    data = largest(kind)
    assert fastest(lambda: try_to_read(Memory(data)), within=MAX_SECONDS) < MAX_SECONDS
    tracemalloc.start()
    try:
        try_to_read(Memory(data))
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def try_to_read(source: Memory) -> bool:
    """Whether it could be read; anything but a HomespecError fails the test."""
    try:
        touch(read_header(source))
    except HomespecError:
        return False
    return True


# -- damage at random --------------------------------------------------------------------------

NASTY = [0, 1, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def mutate(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to three damages in the header: bits, numbers, and pieces cut out, doubled or moved."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not mutated:
            break
        at, length = rng.randrange(min(header_bytes, len(mutated))), rng.randint(1, 64)
        match rng.randrange(7):
            case 0:
                mutated[at] ^= 1 << rng.randrange(8)
            case 1:
                mutated[at : at + 8] = U64(rng.choice(NASTY))
            case 2:
                mutated[at : at + 4] = U32(rng.choice(NASTY) % 2**32)
            case 3:
                del mutated[at : at + length]
            case 4:
                mutated[at:at] = mutated[at : at + length]
            case 5:
                mutated[at : at + length] = rng.randbytes(length)
            case 6:
                del mutated[at:]
    return bytes(mutated)


def read_and_timed(mutant: Memory) -> tuple[bool, float]:
    """Whether it could be read, and the seconds that it took."""
    outcomes: list[bool] = []
    seconds = fastest(lambda: outcomes.append(try_to_read(mutant)), within=MAX_SECONDS)
    return outcomes[0], seconds


def run_mutations(data: bytes, header_bytes: int, count: int, seed: int) -> tuple[int, float]:
    """How many mutants could still be read, and the seconds of the slowest."""
    rng, read, slowest = random.Random(seed), 0, 0.0
    for _ in range(count):
        mutant = Memory(mutate(data, header_bytes, rng))
        was_read, seconds = read_and_timed(mutant)
        read, slowest = read + was_read, max(slowest, seconds)
    return read, slowest


def test_two_thousand_damaged_headers(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"general.alignment": 32})
    data, header_bytes = path.read_bytes(), read_header(path).data_offset
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        read, slowest = run_mutations(data, header_bytes, 2000, seed=1)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_BYTES / 1024
    assert slowest < MAX_SECONDS
    assert 0 < read < 2000, "mutations that all fail, or none, test nothing"


@pytest.mark.skipif(not list(real_files()), reason="no real model at hand")
def test_damaged_headers_of_a_real_model() -> None:
    path = min(real_files(), key=lambda path: path.stat().st_size)
    header = read_header(path)
    with path.open("rb") as file:
        head = file.read(header.data_offset)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(2)
    for _ in range(100):
        mutant = Memory(mutate(head, header.data_offset, rng), size=header.file_size)
        assert read_and_timed(mutant)[1] < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_BYTES / 1024


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_after_the_magic(rest: bytes) -> None:
    try_to_read(Memory(b"GGUF" + rest))
    try_to_read(Memory(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + rest))
    try_to_read(Memory(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + rest))


SCALARS = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=50),
    st.lists(st.integers(0, 100), min_size=1, max_size=9),
    st.lists(st.text(max_size=9), min_size=1, max_size=9),
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=20).map("x.".__add__), SCALARS, max_size=12))
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("written") / "a.gguf"
    found = read_header(write_tiny_gguf(path, metadata=values)).metadata
    for key, value in values.items():
        assert plain(found[key]) == value


# -- models that cannot write ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("bert", {}, "encoder-only"),
        ("nomic-bert", {}, "encoder-only"),
        ("jina-bert-v2", {}, "encoder-only"),
        ("t5encoder", {}, "encoder-only"),
        ("gemma-embedding", {}, "encoder-only"),
        ("t5", {}, "encoder-decoder"),
        ("dream", {}, "diffusion"),
        ("eagle3", {}, "draft head"),
        ("clip", {}, "pictures"),
        ("llama", {"general.type": "adapter"}, "adapter"),
        ("llama", {"general.type": "imatrix"}, "importance matrix"),
        ("qwen3", {"qwen3.attention.causal": False}, "embedding model"),
    ],
)
def test_models_that_write_no_text_are_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, object], message: str
) -> None:
    header = read_header(
        write_tiny_gguf(tmp_path / "a.gguf", architecture=architecture, metadata=metadata)
    )
    assert header.has_decoder == ("general.type" in metadata)
    with pytest.raises(ModelError, match=message) as caught:
        require_text_model(header)
    assert caught.value.hint


PIECES = tokenizer_metadata(300)["tokenizer.ggml.tokens"]
# Each of these makes llama.cpp end the whole process, with a failed assertion.
FATAL = {
    "no layers": {"llama.block_count": 0},
    "too many layers": {"llama.block_count": 513},
    "a piece twice": {"tokenizer.ggml.tokens": [*PIECES[:-1], PIECES[0]]},
    "unknown position scaling": {"llama.rope.scaling.type": "x"},
    "more experts used than there are": {
        "llama.expert_count": 2,
        "llama.expert_used_count": 4,
    },
    "no expert used": {"llama.expert_count": 4},
    "groups without experts": {"llama.expert_group_count": 3},
    "more prediction layers than layers": {"llama.nextn_predict_layers": 5},
    "normalization by nothing": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "a layer without heads": {"llama.attention.head_count_kv": [1, 0]},
    "no tokenizer": {"tokenizer.ggml.model": "none"},
    "bytes that cannot be written": {"tokenizer.ggml.model": "llama"},
}


@pytest.mark.parametrize("case", FATAL)
def test_what_would_end_the_process_is_refused(tmp_path: Path, case: str) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "a.gguf", metadata=FATAL[case]))
    with pytest.raises(ModelError):
        require_text_model(header)


@pytest.mark.parametrize("missing", ["context_length", "block_count", "embedding_length"])
def test_a_model_without_its_sizes_is_refused(tmp_path: Path, missing: str) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "a.gguf", metadata={f"llama.{missing}": None}))
    with pytest.raises(ModelError, match="does not state its " + missing.replace("_", " ")):
        require_text_model(header)


def test_a_local_source_closes_and_reads_to_its_end(tiny: Path) -> None:
    with FileSource(tiny) as source:
        assert source.read(source.size - 4, 100) == tiny.read_bytes()[-4:]
    with pytest.raises(ValueError, match="closed"):
        source.read(0, 1)
