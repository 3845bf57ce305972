"""GGUF files with the shapes of real models and no weights: the data is one hole in the file.

llama.cpp tells the memory such a model takes without allocating it (`no_alloc`), and a header
reader sees no difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from tests.tiny_gguf import typed


@dataclass(frozen=True)
class Shape:
    """The measures of a transformer; `heads`/`kv_heads` of `head_size` each.

    kind, embedding_kind: names of tensor types. extra: further metadata, without the prefix.
    """

    architecture: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    kind: str = "Q4_K"
    embedding_kind: str = "Q6_K"
    experts: int = 0
    experts_used: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, True, "Q4_0", "Q8_0"),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True, "Q4_0", "Q8_0"),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-32b": Shape("qwen2", 64, 5120, 27648, 40, 8, 128, 152064),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, "Q8_0", "Q8_0"),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, experts=128, experts_used=8
    ),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.3-70b": Shape("llama", 80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3.5-0.8b": Shape(
        "qwen35", 24, 1024, 3584, 8, 2, 256, 248320, True, "Q4_0", "Q8_0",
        extra={
            "ssm.conv_kernel": 4, "ssm.inner_size": 2048, "ssm.state_size": 128,
            "ssm.time_step_rank": 16, "ssm.group_count": 16, "full_attention_interval": 4,
            "rope.dimension_sections": [11, 11, 10, 0], "rope.dimension_count": 64,
        },
    ),
    "mamba-130m": Shape(
        "mamba", 24, 768, 0, 0, 0, 0, 50280, True, "Q8_0", "Q8_0",
        extra={
            "ssm.conv_kernel": 4, "ssm.inner_size": 1536, "ssm.state_size": 16,
            "ssm.time_step_rank": 48,
        },
    ),
    "gemma-3-270m": Shape(
        "gemma3", 18, 640, 2048, 4, 1, 256, 262144, True, "Q8_0", "Q8_0",
        extra={"attention.sliding_window": 512},
    ),
    "gemma-3-4b": Shape(
        "gemma3", 34, 2560, 10240, 8, 4, 256, 262208, True,
        extra={"attention.sliding_window": 1024},
    ),
}  # fmt: skip


def write_shaped_gguf(path: Path, shape: Shape | str, **changes: Any) -> Path:
    """Write a model of that shape, some measures changed, without a vocabulary."""
    shape = replace(SHAPES[shape] if isinstance(shape, str) else shape, **changes)
    writer = GGUFWriter(None, shape.architecture)
    for key, value in _metadata(shape).items():
        writer.add_key_value(key, *typed(value))
    size = 0
    for name, dimensions, kind in tensors(shape):
        quantization = GGMLQuantizationType[kind]
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        n_bytes = math.prod(dimensions) // block * block_bytes
        writer.add_tensor_info(
            name, dimensions[::-1], np.dtype(np.float32), n_bytes, raw_dtype=quantization
        )
        size += -(-n_bytes // 32) * 32
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + size)
    return path


def _metadata(shape: Shape) -> dict[str, Any]:
    measures: dict[str, Any] = {
        "context_length": 131072,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_size,
        "vocab_size": shape.vocabulary,
    }
    if shape.experts:
        measures |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.feed_forward,
        }
    if not shape.heads:
        measures = {key: value for key, value in measures.items() if "attention." not in key}
        measures["attention.layer_norm_rms_epsilon"] = 1e-6
        del measures["rope.dimension_count"]
    measures |= shape.extra
    return {
        "general.name": shape.architecture,
        "tokenizer.ggml.model": "no_vocab",
        **{f"{shape.architecture}.{key}": value for key, value in measures.items()},
    }


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, dimensions with the fastest first, type) of each tensor."""
    yield "token_embd.weight", (shape.width, shape.vocabulary), shape.embedding_kind
    if not shape.tied:
        yield "output.weight", (shape.width, shape.vocabulary), shape.embedding_kind
    yield "output_norm.weight", (shape.width,), "F32"
    for layer in range(shape.layers):
        for name, dimensions, kind in _layer(shape, layer):
            yield f"blk.{layer}.{name}", dimensions, kind


def _layer(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    if shape.architecture == "mamba":
        yield from _mamba(shape)
        return
    if shape.architecture == "qwen35" and (layer + 1) % 4:
        yield from _delta_net(shape)
    else:
        yield from _attention(shape)
    yield from _feed_forward(shape)


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, head = shape.width, shape.head_size
    gates = 2 if shape.architecture == "qwen35" else 1
    yield "attn_norm.weight", (width,), "F32"
    yield "attn_q.weight", (width, head * shape.heads * gates), shape.kind
    yield "attn_k.weight", (width, head * shape.kv_heads), shape.kind
    yield "attn_v.weight", (width, head * shape.kv_heads), shape.kind
    yield "attn_output.weight", (head * shape.heads, width), shape.kind
    if shape.architecture == "qwen2":
        yield "attn_q.bias", (head * shape.heads,), "F32"
        yield "attn_k.bias", (head * shape.kv_heads,), "F32"
        yield "attn_v.bias", (head * shape.kv_heads,), "F32"
    if shape.architecture in ("qwen3", "qwen3moe", "gemma3", "qwen35"):
        yield "attn_q_norm.weight", (head,), "F32"
        yield "attn_k_norm.weight", (head,), "F32"


def _feed_forward(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, feed = shape.width, shape.feed_forward
    if shape.architecture == "qwen35":
        yield "post_attention_norm.weight", (width,), "F32"
    else:
        yield "ffn_norm.weight", (width,), "F32"
    if shape.architecture == "gemma3":
        yield "post_attention_norm.weight", (width,), "F32"
        yield "post_ffw_norm.weight", (width,), "F32"
    if shape.experts:
        yield "ffn_gate_inp.weight", (width, shape.experts), "F32"
        yield "ffn_gate_exps.weight", (width, feed, shape.experts), shape.kind
        yield "ffn_down_exps.weight", (feed, width, shape.experts), shape.kind
        yield "ffn_up_exps.weight", (width, feed, shape.experts), shape.kind
        return
    yield "ffn_gate.weight", (width, feed), shape.kind
    yield "ffn_up.weight", (width, feed), shape.kind
    yield "ffn_down.weight", (feed, width), shape.kind


def _delta_net(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, state = shape.width, shape.extra["ssm.state_size"]
    heads, groups = shape.extra["ssm.time_step_rank"], shape.extra["ssm.group_count"]
    keys, values = state * groups, state * heads
    yield "attn_norm.weight", (width,), "F32"
    yield "attn_qkv.weight", (width, 2 * keys + values), shape.kind
    yield "attn_gate.weight", (width, values), shape.kind
    yield "ssm_conv1d.weight", (shape.extra["ssm.conv_kernel"], 2 * keys + values), "F32"
    yield "ssm_dt.bias", (heads,), "F32"
    yield "ssm_a", (heads,), "F32"
    yield "ssm_beta.weight", (width, heads), shape.kind
    yield "ssm_alpha.weight", (width, heads), shape.kind
    yield "ssm_norm.weight", (state,), "F32"
    yield "ssm_out.weight", (values, width), shape.kind


def _mamba(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, inner = shape.width, shape.extra["ssm.inner_size"]
    state, rank = shape.extra["ssm.state_size"], shape.extra["ssm.time_step_rank"]
    yield "attn_norm.weight", (width,), "F32"
    yield "ssm_in.weight", (width, 2 * inner), shape.kind
    yield "ssm_conv1d.weight", (shape.extra["ssm.conv_kernel"], inner), "F32"
    yield "ssm_conv1d.bias", (inner,), "F32"
    yield "ssm_x.weight", (inner, rank + 2 * state), shape.kind
    yield "ssm_dt.weight", (rank, inner), "F32"
    yield "ssm_dt.bias", (inner,), "F32"
    yield "ssm_a", (state, inner), "F32"
    yield "ssm_d", (inner,), "F32"
    yield "ssm_out.weight", (inner, width), shape.kind
