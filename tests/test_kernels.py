"""homespec's kernels in llama.cpp: the bits of one token at a time, for any number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from homespec.llama.library import ggml, has_own_kernels

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)
SHAPES = ((40, 256), (33, 2048))  # rows, numbers a row: chunks and blocks that do not come out even

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
matrix = function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, long, long)
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
    (rows, width), (tokens, _) = weights.shape, activations.shape
    memory = init(Memory(64 << 20, None, False))
    a = matrix(memory, kind, width, rows)
    quantize(kind, weights.ctypes.data, data(a), 0, rows, width, None)
    b = matrix(memory, 0, width, tokens)
    ctypes.memmove(data(b), activations.ctypes.data, activations.nbytes)
    c, graph = mul_mat(memory, a, b), new_graph(memory)
    expand(graph, c)
    assert compute(memory, graph, threads) == 0
    found = ctypes.string_at(data(c), 4 * rows * tokens)
    free(memory)
    return found

kind, shapes, widths = json.loads(sys.argv[1])
random, found = np.random.default_rng(1), {}
for rows, width in shapes:
    weights = random.normal(size=(rows, width)).astype(np.float32)
    for tokens in widths:
        activations = random.normal(size=(tokens, width)).astype(np.float32)
        together = product(kind, weights, activations, 1 + tokens % 3)
        apart = b"".join(product(kind, weights, activations[t : t + 1], 2) for t in range(tokens))
        name = f"{rows} x {width} x {tokens}"
        found[name] = [together == apart, hashlib.sha256(together).hexdigest()]
print(json.dumps([products(), found]))
"""


def _products(kind: int, *, own: bool) -> tuple[int, dict[str, list[object]]]:
    environment = {"HOMESPEC_KERNELS": str(int(own)), "GGML_CPU_TILED_MM": "0"}
    command = [sys.executable, "-c", _CHILD, json.dumps([kind, SHAPES, TOKENS])]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    computed, found = json.loads(done.stdout)
    return computed, found


def test_the_library_tells_whether_it_has_the_kernels() -> None:
    assert has_own_kernels() == (hasattr(ggml(), "homespec_products"))


@pytest.mark.parametrize(("quant", "kind"), [("Q4_K", 12), ("Q5_K", 13), ("Q6_K", 14)])
def test_several_tokens_give_the_bits_of_one_at_a_time(quant: str, kind: int) -> None:
    if not has_own_kernels():
        pytest.skip("this build of llama.cpp has no kernels of homespec")
    computed, found = _products(kind, own=True)
    without, stock = _products(kind, own=False)
    assert computed == len(SHAPES) * (len(TOKENS) - 1), "each but that of one token"
    assert without == 0
    assert all(same for same, _ in found.values()), quant
    assert found == stock
