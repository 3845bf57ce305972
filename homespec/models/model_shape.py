"""The measures of a model that decide how much memory it takes, told from its header."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from homespec.models import architectures
from homespec.models.gguf_header import Header
from homespec.models.gguf_parser import Tensor

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# Looked up by token, never multiplied: llama.cpp keeps them in RAM.
_INPUT = ("token_", "position_", "per_layer_token_")
_RECURRENT = ("ssm_", "shortconv", "time_mix")
# llama.cpp keeps snapshots of the states of these, so that tokens can be taken back.
_KEEPS_SNAPSHOTS = {"bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "lfm2", "lfm2moe"}
_KEEPS_SNAPSHOTS |= {"nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: its tensors, their bytes, and the elements of keys and values of one token."""

    tensors: tuple[Tensor, ...]
    n_bytes: int
    key_width: int = 0
    value_width: int = 0
    recurrent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelShape:
    """What decides the memory of a model. Widths in elements, of the widest layer.

    input_tensors stay in RAM; output is the last "layer". expert_width: of one expert's
    feed-forward part. state_width, conv_state_width: elements a recurrent layer keeps.
    vocabulary_entries: pieces and merge rules. tied: the table of tokens is the output matrix.
    """

    name: str
    layers: tuple[Layer, ...]
    input_tensors: tuple[Tensor, ...]
    output: Layer
    file_bytes: int
    vocabulary: int
    vocabulary_entries: int
    embedding_width: int
    query_width: int
    heads: int
    feed_forward_width: int
    experts_used: int = 0
    expert_width: int = 0
    conv_width: int = 0
    inner_width: int = 0
    state_width: int = 0
    conv_state_width: int = 0
    mask_count: int = 1
    context_length: int = 0
    tied: bool = False
    keeps_snapshots: bool = False

    @property
    def tied_table(self) -> Tensor | None:
        """The table of tokens where it is the output matrix as well."""
        tables = [tensor for tensor in self.input_tensors if tensor.name == "token_embd.weight"]
        return tables[0] if self.tied and tables else None

    @property
    def recurrent(self) -> bool:
        """Whether some layer keeps a state instead of keys and values."""
        return any(layer.recurrent for layer in self.layers)

    @property
    def state_elements(self) -> int:
        """The elements of one state of a recurrent layer."""
        return self.state_width + self.conv_state_width

    def snapshots(self, asked: int) -> int:
        """How many snapshots of its states llama.cpp really keeps."""
        return asked if self.keeps_snapshots else 0


def model_shape(header: Header) -> ModelShape:
    """The measures of a model. Raises ModelError where the header contradicts itself."""
    inside: list[list[Tensor]] = [[] for _ in range(header.block_count)]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for tensor in header.tensors:
        match = _IN_LAYER.match(tensor.name)
        if match and int(match[1]) < len(inside):
            inside[int(match[1])].append(tensor)
        else:
            (inputs if tensor.name.startswith(_INPUT) else outputs).append(tensor)
    layers = _layers(header, inside)
    conv, state = _recurrent_widths(header) if any(layer.recurrent for layer in layers) else (0, 0)
    stated = header.recurrent_state
    inner = stated.get("ssm.inner_size", 0)
    groups = stated.get("ssm.group_count", 0) * stated.get("ssm.state_size", 0)
    everything = [tensor for tensors in inside for tensor in tensors]
    return ModelShape(
        name=PurePosixPath(header.source).name,
        layers=layers,
        input_tensors=tuple(inputs),
        output=_layer(outputs),
        file_bytes=header.expected_file_size,
        vocabulary=_columns(inputs, "token_embd.weight") or len(header.tokens),
        vocabulary_entries=len(header.tokens) + len(header.strings("tokenizer.ggml.merges") or ()),
        embedding_width=header.embedding_length,
        query_width=max(header.head_count, default=0) * header.key_length,
        heads=max(header.head_count, default=0),
        feed_forward_width=_widest(everything, ("ffn_up.", "ffn_gate.")),
        experts_used=_experts_used(header),
        expert_width=_widest(everything, ("ffn_up_exps.", "ffn_gate_exps.", "ffn_gate_up_exps.")),
        conv_width=inner + 2 * groups,
        inner_width=inner,
        state_width=state,
        conv_state_width=conv,
        mask_count=2 if header.sliding_window else 1,
        context_length=header.context_length,
        tied=not any(tensor.name == "output.weight" for tensor in outputs),
        keeps_snapshots=header.architecture in _KEEPS_SNAPSHOTS,
    )


def _layer(tensors: list[Tensor], keys: int = 0, values: int = 0, recurrent: bool = False) -> Layer:
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return Layer(tuple(tensors), n_bytes, keys, values, recurrent)


def _layers(header: Header, inside: list[list[Tensor]]) -> tuple[Layer, ...]:
    pure = header.cache_kind is architectures.CacheKind.RECURRENT
    shared = header.integer(header.of_architecture("attention.shared_kv_layers")) or 0
    layers = []
    for index, tensors in enumerate(inside):
        names = {tensor.name.split(".", 2)[2] for tensor in tensors}
        recurrent = pure or any(name.startswith(_RECURRENT) for name in names)
        keys, values = _cache_widths(header, index, tensors, recurrent)
        if index >= len(inside) - shared:  # these read an earlier layer's cache
            keys = values = 0
        layers.append(_layer(tensors, keys, values, recurrent))
    return tuple(layers)


def _cache_widths(
    header: Header, index: int, tensors: list[Tensor], recurrent: bool
) -> tuple[int, int]:
    """The elements of one token's keys and values in a layer."""
    compressed = _columns(tensors, "attn_kv_a_mqa.weight")
    if compressed:
        if _columns(tensors, "attn_k_b.weight"):
            return compressed, 0  # values are read out of the keys
        heads = header.head_count[index]
        return heads * header.key_length, heads * header.value_length
    keys, values = (_columns(tensors, f"attn_{kind}.weight") for kind in "kv")
    if keys:
        return keys, values or keys
    if _columns(tensors, "attn_qkv.weight") and not recurrent:
        heads = header.head_count_kv[index]
        return heads * header.key_length, heads * header.value_length
    return 0, 0


def _recurrent_widths(header: Header) -> tuple[int, int]:
    """Elements of a recurrent layer's convolution state and of its state, as llama.cpp has them."""
    stated, width = header.recurrent_state, header.embedding_length
    heads = max(header.head_count, default=0)
    if head := stated.get("wkv.head_size"):
        shifts = header.integer(header.of_architecture("token_shift_count")) or 2
        return shifts * width, width * head
    if length := stated.get("shortconv.l_cache"):
        return width * (length - 1), 0
    kernel = stated.get("ssm.conv_kernel", 4) - 1
    if head := stated.get("kda.head_dim"):
        return 3 * kernel * heads * head, head * head * heads
    state, inner = stated.get("ssm.state_size", 0), stated.get("ssm.inner_size", 0)
    return kernel * (inner + 2 * stated.get("ssm.group_count", 0) * state), state * inner


def _experts_used(header: Header) -> int:
    used = header.per_layer(header.of_architecture("expert_used_count"))
    return max(used, default=0) if used else 0


def _columns(tensors: Iterable[Tensor], ending: str) -> int:
    """The outputs of a matrix, 0 where it is not there."""
    return next(
        (
            tensor.shape[1]
            for tensor in tensors
            if len(tensor.shape) > 1
            and (tensor.name == ending or tensor.name.endswith(f".{ending}"))
        ),
        0,
    )


def _widest(tensors: Iterable[Tensor], parts: tuple[str, ...]) -> int:
    return max(
        (
            tensor.shape[1]
            for tensor in tensors
            if len(tensor.shape) > 1 and any(f".{part}" in tensor.name for part in parts)
        ),
        default=0,
    )
