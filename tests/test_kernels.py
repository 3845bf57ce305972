"""homespec's kernels in llama.cpp: the bits of one token at a time, for any number of tokens."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from homespec.errors import LibraryError
from homespec.llama import library
from homespec.llama.library import build_features, has_own_kernels
from homespec.models.gguf_parser import Tensor
from homespec.models.kernels import own_kernels_serve

NARROW = (1, 2, 3, 4, 5, 6, 7, 8)
WIDE = (9, 10, 16, 17, 24, 25, 33, 65, 140)  # past 128 there is a second panel
TOKENS = (*NARROW, *WIDE)
QUANTS = [("Q4_K", 12), ("Q5_K", 13), ("Q6_K", 14)]
SHAPES = ((1, 40, 256), (1, 33, 2048), (2, 17, 512))  # matrices, rows, numbers a row

_CHILD = """
import ctypes, hashlib, json, sys
import numpy as np
from homespec.llama.library import ggml

lib = ggml()
pointer = ctypes.c_void_p

class Memory(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", pointer), ("no_alloc", ctypes.c_bool)]

def function(name, result, *arguments):
    found = getattr(lib, name)
    found.restype, found.argtypes = result, arguments
    return found

init = function("ggml_init", pointer, Memory)
long = ctypes.c_int64
matrices = function(
    "ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, long, long, long
)
data = function("ggml_get_data", pointer, pointer)
quantize = function("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer,
                    long, long, long, pointer)
mul_mat = function("ggml_mul_mat", pointer, pointer, pointer, pointer)
new_graph = function("ggml_new_graph", pointer, pointer)
expand = function("ggml_build_forward_expand", None, pointer, pointer)
compute = function("ggml_graph_compute_with_ctx", ctypes.c_int, pointer, pointer, ctypes.c_int)
free = function("ggml_free", None, pointer)
function("ggml_cpu_init", None)()
products = function("homespec_products", long)

def product(kind, weights, activations, threads):
    (planes, rows, width), tokens = weights.shape, activations.shape[1]
    memory = init(Memory(64 << 20, None, False))
    a = matrices(memory, kind, width, rows, planes)
    quantize(kind, weights.ctypes.data, data(a), 0, planes * rows, width, None)
    b = matrices(memory, 0, width, tokens, planes)
    ctypes.memmove(data(b), activations.ctypes.data, activations.nbytes)
    c, graph = mul_mat(memory, a, b), new_graph(memory)
    expand(graph, c)
    assert compute(memory, graph, threads) == 0
    found = np.frombuffer(ctypes.string_at(data(c), 4 * planes * tokens * rows), np.float32)
    free(memory)
    return found.reshape(planes, tokens, rows)

kind, shapes, widths = json.loads(sys.argv[1])
random, found = np.random.default_rng(1), {}
for shape in shapes:
    weights = random.normal(size=shape).astype(np.float32)
    drawn = random.normal(size=(shape[0], max(widths), shape[2])).astype(np.float32)
    each = [np.ascontiguousarray(drawn[:, [t]]) for t in range(max(widths))]
    apart = np.concatenate([product(kind, weights, one, 2) for one in each], axis=1)
    for tokens in widths:
        activations = np.ascontiguousarray(drawn[:, :tokens])
        together = product(kind, weights, activations, 1 + tokens % 3)
        error = float(np.abs(together - apart[:, :tokens]).max() / np.abs(apart).max())
        begin = np.ascontiguousarray(together[:, :9])
        found[f"{shape} x {tokens}"] = [error, hashlib.sha256(begin.tobytes()).hexdigest()]
print(json.dumps([products(), found]))
"""


def _products(kind: int, own: str) -> tuple[int, dict[str, tuple[float, str]]]:
    """How many it computed; for each shape and width the error, and a digest of 9 tokens' sums."""
    environment = {"HOMESPEC_KERNELS": own, "GGML_CPU_TILED_MM": "0"}
    command = [sys.executable, "-c", _CHILD, json.dumps([kind, SHAPES, TOKENS])]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    computed, found = json.loads(done.stdout)
    return computed, found


def test_builds_of_the_set_up_have_the_kernels_where_the_cpu_bears_them() -> None:
    note = Path(sys.prefix) / "homespec-build.json"
    if not note.exists() or os.environ.get("HOMESPEC_KERNELS") == "0":
        pytest.skip("not a build of scripts/setup, or without its kernels")
    bears = {"AVX2", "FMA", "F16C"} <= set(build_features()["CPU"])
    assert has_own_kernels() == (bears and sys.platform == "linux")


def test_they_serve_plain_matrices_of_k_quants() -> None:
    def tensor(kind: str, *shape: int) -> Tensor:
        return Tensor("a.weight", shape, kind, 0, math.prod(shape) // 2)

    dense = [tensor("Q4_K", 256, 64), tensor("Q6_K", 256, 8), tensor("F16", 256, 99)]
    assert own_kernels_serve([*dense, tensor("F32", 9999)])
    assert not own_kernels_serve([*dense, tensor("Q4_K", 256, 64, 8)])  # experts
    assert not own_kernels_serve([tensor("Q4_0", 256, 64), tensor("Q6_K", 256, 8)])
    assert not own_kernels_serve([])


@pytest.mark.parametrize(("quant", "kind"), QUANTS)
def test_several_tokens_give_the_bits_of_one_at_a_time(quant: str, kind: int) -> None:
    if not has_own_kernels():
        pytest.skip("this build of llama.cpp has no kernels of homespec")
    computed, found = _products(kind, "exact")
    without, stock = _products(kind, "0")
    matrices = sum(planes for planes, _, _ in SHAPES)
    assert computed == matrices * (len(TOKENS) - 1), "each but that of one token"
    assert without == 0
    for shape in SHAPES:
        for tokens in TOKENS:
            key = f"{list(shape)} x {tokens}"
            assert found[key][0] == 0, f"{quant}, {key}"
            assert found[key] == stock[key]


@pytest.mark.parametrize(("quant", "kind"), QUANTS)
def test_nine_tokens_or_more_give_the_same_but_for_rounding(quant: str, kind: int) -> None:
    if not has_own_kernels():
        pytest.skip("this build of llama.cpp has no kernels of homespec")
    _, found = _products(kind, "1")
    for shape in SHAPES:
        assert all(found[f"{list(shape)} x {tokens}"][0] == 0 for tokens in NARROW), quant
        wide = [found[f"{list(shape)} x {tokens}"] for tokens in WIDE]
        assert all(0 < error < 1e-5 for error, _ in wide), quant
        assert len({digest for _, digest in wide}) == 1, "the bits depend on the width"


def test_own_kernels_are_taken_unasked_where_the_cpu_has_none_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "has_own_kernels", lambda: True)
    monkeypatch.delenv("GGML_CPU_TILED_MM", raising=False)
    for features, pay in ((["AVX2"], True), (["AVX2", "AVX512_VNNI"], False)):
        monkeypatch.setattr(library, "build_features", lambda found=features: {"CPU": found})
        assert library.own_kernels_pay() == pay
    monkeypatch.setattr(library, "build_features", lambda: {"CPU": ["AVX2"]})
    for asked, pay in (("0", True), ("1", False)):  # homespec itself sets 0
        monkeypatch.setenv("GGML_CPU_TILED_MM", asked)
        assert library.own_kernels_pay() == pay
    monkeypatch.undo()
    monkeypatch.setenv("HOMESPEC_KERNELS", "0")
    assert not library.has_own_kernels()


def test_exact_kernels_are_chosen_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_own_kernels", lambda: True)
    monkeypatch.setattr(library, "_passes_made", [])
    monkeypatch.setenv("HOMESPEC_KERNELS", "1")
    monkeypatch.delenv("GGML_CPU_TILED_MM", raising=False)
    assert library.leave_tiled_kernels()
    assert os.environ["HOMESPEC_KERNELS"] == "1"
    monkeypatch.setattr(library, "_passes_made", [True])
    with pytest.raises(LibraryError, match="before anything is decoded"):
        library.use_exact_kernels()
    monkeypatch.setattr(library, "_passes_made", [])
    library.use_exact_kernels()
    assert os.environ["HOMESPEC_KERNELS"] == "exact"
    monkeypatch.setattr(library, "_passes_made", [True])
    library.use_exact_kernels()  # once more does no harm
    monkeypatch.setenv("HOMESPEC_KERNELS", "0")
    found = library.kernel_environment(tiled=False, exact=True)
    assert found == {"HOMESPEC_KERNELS": "0", "GGML_CPU_TILED_MM": "0"}
