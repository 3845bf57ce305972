"""Which weights llama.cpp's CPU backend copies into a layout it multiplies faster.

A copied matrix is in memory twice while the file is mapped: the copy, and the file's pages, which
nothing reads again and the system takes back when it needs room. The rules are those of
`ggml_repack_get_optimal_repack_type` and of the AMX buffer type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from homespec.models.gguf_parser import Tensor
from homespec.models.model_shape import Layer

Features = frozenset[str]
_AMX_ROWS, _AMX_SMALL, _AMX_LARGE = 32, 64, 256
# Type -> the multiple its rows must be long, and the bytes added for each so many weights.
_AMX_TYPES = {
    "Q4_0": (_AMX_SMALL, 32, 0),
    "Q4_1": (_AMX_SMALL, 32, 0),
    "Q8_0": (_AMX_SMALL, 32, 4),
    "Q4_K": (_AMX_LARGE, 256, 4),
    "Q5_K": (_AMX_LARGE, 256, 4),
    "Q6_K": (_AMX_LARGE, 256, 0),
    "IQ4_XS": (_AMX_LARGE, 256, 2),
    "F16": (16, 16, 0),
}


def copied_bytes(tensor: Tensor, features: Features) -> int:
    """The size of the copy the CPU backend makes of a matrix; 0 where it reads it in place."""
    if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return 0
    return _amx_copy(tensor, features) or _repacked_copy(tensor, features)


@lru_cache(maxsize=4096)  # a plan asks for every layer at every number of offloaded ones
def copied_in_layer(layer: Layer, features: Features) -> tuple[int, int]:
    """(bytes of the copies, bytes of the matrices copied) of a layer in RAM."""
    copies, originals = 0, 0
    for tensor in layer.tensors:
        copy = copied_bytes(tensor, features)
        copies += copy
        originals += tensor.n_bytes if copy else 0
    return copies, originals


def _amx_copy(tensor: Tensor, features: Features) -> int:
    if "AMX_INT8" not in features or "AVX512_VNNI" not in features or len(tensor.shape) != 2:
        return 0
    multiple, per, extra = _AMX_TYPES.get(tensor.type_name, (0, 1, 0))
    row, rows = tensor.shape
    if not multiple or row % multiple or rows % _AMX_ROWS:
        return 0
    return tensor.n_bytes + tensor.n_elements // per * extra


def _repacked_copy(tensor: Tensor, features: Features) -> int:
    if "REPACK" not in features:
        return 0
    multiple = _ROWS.get(tensor.type_name, _never)(features)
    return tensor.n_bytes if multiple and tensor.shape[1] % multiple == 0 else 0


# Each answers with the multiple that a matrix must have in rows, 0 where it is not repacked.


def _never(_: Features) -> int:
    return 0


def _q4_0(features: Features) -> int:
    if "AVX2" in features:
        return 8
    return 4 if features & {"MATMUL_INT8", "DOTPROD", "VXE"} else _riscv(features)


def _k_quant(features: Features) -> int:
    return 8 if "AVX2" in features or _arm(features) else _riscv(features)


def _arm_k_quant(features: Features) -> int:
    return 8 if _arm(features) else 0


def _small_block(features: Features) -> int:
    if "AVX2" in features:
        return 8
    return 4 if "DOTPROD" in features else _riscv(features)


def _q8_0(features: Features) -> int:
    return 4 if _arm(features) else _riscv(features)


def _q2_k(features: Features) -> int:
    return 8 if "AVX512" in features else _riscv(features)


def _arm(features: Features) -> bool:
    return bool(features & {"MATMUL_INT8", "DOTPROD"})


def _riscv(features: Features) -> int:
    return 16 if "RISCV_V" in features else 0


_ROWS: dict[str, Callable[[Features], int]] = {
    "Q4_0": _q4_0,
    "Q4_K": _k_quant,
    "Q5_K": _arm_k_quant,
    "Q6_K": _arm_k_quant,
    "Q2_K": _q2_k,
    "IQ4_NL": _small_block,
    "MXFP4": _small_block,
    "Q8_0": _q8_0,
    "Q1_0": _arm_k_quant,
}
