"""The estimate against llama.cpp's own figures, for models of real shapes and a real file.

llama.cpp says how large its buffers would be without allocating them (`no_alloc`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from homespec.errors import UsageError
from homespec.llama.context import CACHE_TYPES, Context, ContextParams
from homespec.llama.library import build_features, library
from homespec.llama.model import Model
from homespec.models import compute_size
from homespec.models.gguf_header import read_header
from homespec.models.machine import GIB, DeviceMemory
from homespec.models.memory_estimate import RAM, MemoryParts, estimate, row_bytes
from homespec.models.model_shape import ModelShape, model_shape
from homespec.models.placement import ContextSettings, place_layers

from tests.shaped_gguf import SHAPES, write_shaped_gguf

MIB = 1 << 20
FEATURES = frozenset(build_features().get("CPU", []))
SETTINGS = {
    "usual": ContextSettings(),
    "long": ContextSettings(n_ctx=16384),
    "short": ContextSettings(n_ctx=512),
    "scores": ContextSettings(flash_attention="off"),
    "long scores": ContextSettings(n_ctx=16384, flash_attention="off"),
    "quantized": ContextSettings(cache_type_k="q8_0", cache_type_v="q8_0"),
    "mixed": ContextSettings(cache_type_k="bf16", cache_type_v="q4_0"),
    "draft": ContextSettings(max_rows=1),
    "snapshots": ContextSettings(snapshots=33),
}


@contextmanager
def llama_log() -> Iterator[list[str]]:
    """The lines llama.cpp logs inside."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keeper = logging.getLogger("homespec.llama"), Keeper()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(keeper)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(level)
        logger.propagate = propagate


def mebibytes(lines: list[str], pattern: str) -> float:
    """The sum of the sizes in the lines that match."""
    return sum(float(found[1]) for line in lines if (found := re.search(pattern, line)))


def simulate(path: Path, settings: ContextSettings) -> list[str]:
    """What llama.cpp would allocate on the CPU, as it logs it."""
    low = library()
    model_params = low.llama_model_default_params()
    model_params.no_alloc, model_params.load_mode = True, 0
    model = low.llama_model_load_from_file(str(path).encode(), model_params)
    assert model
    native = low.llama_context_default_params()
    native.n_ctx, native.n_seq_max = settings.n_ctx, 1
    native.n_batch = native.n_ubatch = settings.batch
    native.n_outputs_max = settings.rows
    native.flash_attn_type = {"off": 0, "auto": -1}[settings.flash_attention]
    native.type_k = CACHE_TYPES[settings.cache_type_k]
    native.type_v = CACHE_TYPES[settings.cache_type_v]
    native.swa_full, native.n_rs_seq = True, settings.snapshots
    with llama_log() as lines:
        context = low.llama_init_from_model(model, native)
        assert context, lines
        low.llama_free(context)
    low.llama_model_free(model)
    return lines


def in_ram(shape: ModelShape, settings: ContextSettings, **options: Any) -> MemoryParts:
    placement = place_layers(len(shape.layers), 0, ())
    return estimate(shape, settings, placement, options.get("features", FEATURES))[RAM]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("shaped")

    def write(name: str, **changes: Any) -> Path:
        return write_shaped_gguf(folder / f"{name}.gguf", name, **changes)

    return write


@pytest.mark.parametrize("name", SHAPES)
def test_cache_and_compute_buffers_are_llama_cpps(name: str, shaped: Callable[..., Path]) -> None:
    path = shaped(name)
    shape = model_shape(read_header(path))
    for label, settings in SETTINGS.items():
        lines = simulate(path, settings)
        expected = in_ram(shape, settings)
        cache = mebibytes(lines, r" size = +([\d.]+) MiB \( *\d+ cells")
        assert expected.kv / MIB == pytest.approx(cache, abs=0.05), label
        # The CPU's work space is allocated when it is needed, and never logged.
        predicted = (expected.compute - compute_size.work_bytes(shape, settings)) / MIB
        actual = mebibytes(lines, r"CPU compute buffer size = +([\d.]+)")
        assert predicted == pytest.approx(actual, rel=0.1, abs=1), label


def test_weights_and_output_of_a_loaded_model(starter: Path) -> None:
    settings = ContextSettings(n_ctx=512)
    expected = in_ram(model_shape(read_header(starter)), settings)
    with llama_log() as lines, Model(starter) as model:
        Context(model, ContextParams(n_ctx=512, max_rows=settings.max_rows)).close()
    mapped = mebibytes(lines, r"CPU_Mapped model buffer size = +([\d.]+)")
    copied = mebibytes(lines, r"(?:REPACK|AMX) model buffer size = +([\d.]+)")
    # What lies beside the tensors is the header, some megabytes at most.
    assert (expected.weights + expected.file_pages) / MIB == pytest.approx(mapped + copied, abs=3)
    row = mebibytes(lines, r"output buffer size = +([\d.]+)")  # it grows later, unlogged
    assert expected.output / MIB == pytest.approx(row * settings.rows, rel=0.05)


def test_matrices_the_cpu_copies_are_counted_twice(shaped: Callable[..., Path]) -> None:
    shape = model_shape(read_header(shaped("qwen2.5-1.5b")))
    plain = in_ram(shape, ContextSettings(), features=frozenset())
    repacked = in_ram(shape, ContextSettings(), features=frozenset({"REPACK", "AVX2"}))
    in_layers = sum(
        tensor.n_bytes
        for layer in shape.layers
        for tensor in layer.tensors
        if tensor.type_name == "Q4_K"
    )
    assert plain.weights == repacked.weights
    assert repacked.file_pages - plain.file_pages == in_layers
    assert repacked.needed == plain.needed
    unmapped = in_ram(shape, ContextSettings(mmap=False), features=frozenset({"REPACK", "AVX2"}))
    assert unmapped.file_pages == 0
    assert unmapped.needed == repacked.needed
    locked = in_ram(shape, ContextSettings(mlock=True), features=frozenset({"REPACK", "AVX2"}))
    assert locked.needed == repacked.total


def test_amx_copies_every_usual_type_and_adds_its_sums(shaped: Callable[..., Path]) -> None:
    shape = model_shape(read_header(shaped("qwen3-8b")))
    amx = frozenset({"AMX_INT8", "AVX512_VNNI", "REPACK", "AVX2"})
    parts = in_ram(shape, ContextSettings(), features=amx)
    matrices = [
        tensor
        for tensor in (*shape.output.tensors, *(t for layer in shape.layers for t in layer.tensors))
        if tensor.type_name in ("Q4_K", "Q6_K")
    ]
    assert parts.file_pages >= sum(tensor.n_bytes for tensor in matrices)
    extra = sum(t.n_elements // 256 * 4 for t in matrices if t.type_name == "Q4_K")
    plain = in_ram(shape, ContextSettings(), features=frozenset())
    assert parts.weights - plain.weights == extra


def test_a_tied_table_is_copied_to_where_the_output_is(shaped: Callable[..., Path]) -> None:
    shape = model_shape(read_header(shaped("llama-3.2-1b")))
    assert shape.tied_table is not None
    device = DeviceMemory("GPU0", 24 * GIB, 24 * GIB)
    layers = len(shape.layers)
    parts = estimate(shape, ContextSettings(), place_layers(layers, 99, (device,)), FEATURES)
    in_layers = sum(layer.n_bytes for layer in shape.layers)
    norm = sum(tensor.n_bytes for tensor in shape.output.tensors)
    assert parts["GPU0"].weights == in_layers + norm + shape.tied_table.n_bytes
    assert parts[RAM].weights == sum(tensor.n_bytes for tensor in shape.input_tensors)
    assert parts[RAM].kv == 0


@pytest.mark.parametrize(
    ("settings", "layers", "kv", "compute"),
    [
        (ContextSettings(n_ctx=512), 33, 64.0, 108.5),
        (ContextSettings(), 33, 512.0, 112.0),
        (ContextSettings(n_ctx=32768), 33, 4096.0, 140.0),
        (ContextSettings(n_ctx=131072), 33, 16384.0, 236.0),
        (ContextSettings(cache_type_k="q8_0", cache_type_v="q8_0"), 33, 272.0, 112.1),
        (ContextSettings(n_ctx=32768, cache_type_k="q8_0", cache_type_v="q8_0"), 33, 2176.0, 192.1),
        (ContextSettings(flash_attention="off"), 33, 512.0, 300.0),
        (ContextSettings(n_ctx=16384, n_batch=2048), 33, 2048.0, 496.0),
        (ContextSettings(), 16, 240.0, 124.5),
    ],
)
def test_the_buffers_on_a_gpu_are_those_that_were_allocated_there(
    shaped: Callable[..., Path], settings: ContextSettings, layers: int, kv: float, compute: float
) -> None:
    """kv, compute: MiB in llama.cpp's log on an NVIDIA H200 (docs/gpu.md)."""
    shape = model_shape(read_header(shaped("llama-3.1-8b")))
    device = DeviceMemory("CUDA0", 140 * GIB, 139 * GIB, f16_attention=True)
    parts = estimate(shape, settings, place_layers(32, layers, (device,)), FEATURES)["CUDA0"]
    assert parts.kv / MIB == kv
    # Too much by a few MiB is fine; with layers in RAM, by one more of the largest matrices.
    assert compute <= parts.compute / MIB <= 1.1 * compute + (20 if layers < 33 else 0)


def test_layers_go_to_devices_as_llama_cpp_splits_them() -> None:
    one, two = DeviceMemory("A", 8 * GIB, 6 * GIB), DeviceMemory("B", 8 * GIB, 2 * GIB)
    names = [device.name if device else "-" for device in place_layers(8, 8, (one, two)).layers]
    # The last 8 of 8 layers and the output: three quarters of them on the first.
    assert "".join(names) == "-AAAAAABB"
    assert place_layers(8, 0, (one,)).devices == ()
    assert place_layers(8, 5, ()).gpu_layers == 0
    assert place_layers(8, 99, (one,)).gpu_layers == 9


def test_a_device_holds_its_layers_and_ram_the_rest(shaped: Callable[..., Path]) -> None:
    shape = model_shape(read_header(shaped("qwen3-8b")))
    device = DeviceMemory("GPU0", 8 * GIB, 8 * GIB)
    settings = ContextSettings()
    cpu = in_ram(shape, settings, features=frozenset())
    for count in (1, 10, 36, 37):
        parts = estimate(shape, settings, place_layers(36, count, (device,)), FEATURES)
        assert sum(part.kv for part in parts.values()) == cpu.kv
        assert sum(part.weights for part in parts.values()) == cpu.weights
        assert parts["GPU0"].kv == cpu.kv * (count - 1) // 36
    # Fewer than all: the device also takes in the largest matrix that lies in RAM, in turn.
    part, whole = (
        estimate(shape, settings, place_layers(36, count, (device,)), FEATURES)["GPU0"].compute
        for count in (36, 37)
    )
    assert part > whole


def test_recurrent_states_and_their_snapshots(shaped: Callable[..., Path]) -> None:
    hybrid = model_shape(read_header(shaped("qwen3.5-0.8b")))
    assert sum(layer.recurrent for layer in hybrid.layers) == 18
    none, many = (in_ram(hybrid, ContextSettings(snapshots=count)).kv for count in (0, 33))
    assert many - none == 18 * 33 * 4 * (128 * 2048 + 3 * 6144)
    # llama.cpp keeps none for this one, however many are asked for.
    mamba = model_shape(read_header(shaped("mamba-130m")))
    none, many = (in_ram(mamba, ContextSettings(snapshots=count)).kv for count in (0, 33))
    assert many == none == 24 * 4 * (16 * 1536 + 3 * 1536)


def test_cache_types_take_the_bytes_ggml_says() -> None:
    assert row_bytes(128, "f16") == 256
    assert row_bytes(128, "f32") == 512
    assert row_bytes(128, "q8_0") == 4 * 34
    assert row_bytes(128, "q4_0") == 4 * 18
    with pytest.raises(UsageError, match="cache type"):
        row_bytes(128, "q9_9")


def test_parts_add_up() -> None:
    one = MemoryParts(weights=1, file_pages=2, kv=3, compute=4, output=5, other=6)
    assert one.total == 21
    assert one.needed == 19
    assert (one + one).total == 42
