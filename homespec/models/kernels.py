"""Which weights homespec's own kernels multiply: those of scripts/setup_steps/kernels."""

from __future__ import annotations

from collections.abc import Iterable

from homespec.models.gguf_parser import Tensor

_SERVED = {"Q4_K", "Q5_K", "Q6_K"}
_UNPACKED = {"F32", "F16", "BF16"}  # no kernel is at stake


def own_kernels_serve(tensors: Iterable[Tensor]) -> bool:
    """Whether they multiply most of a model's quantized weights; they do not multiply experts."""
    sizes = {True: 0, False: 0}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.type_name not in _UNPACKED:
            served = len(tensor.shape) == 2 and tensor.type_name in _SERVED
            sizes[served] += tensor.n_bytes
    return sizes[True] > sizes[False]
