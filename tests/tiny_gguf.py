"""A tiny random llama GGUF that llama.cpp loads and runs: half a megabyte, made in milliseconds.

The vocabulary is byte-level BPE (every byte is a token, so any text can be written), then merged
pairs of letters, then four control tokens at its end: BOS, EOS, `<|im_start|>`, `<|im_end|>` (EOT).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter, TokenType
from numpy.typing import NDArray

WIDTH = 64
HEAD_SIZE = 32  # a multiple of 32, so that quantized KV caches work
NUM_HEADS = WIDTH // HEAD_SIZE
NUM_KV_HEADS = 1
FEED_FORWARD = 128
CONTROL_TOKENS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_gguf(
    path: str | Path,
    *,
    seed: int = 0,
    n_layers: int = 2,
    vocab_size: int = 300,
    context_length: int = 512,
    architecture: str = "llama",
    chat_template: str | None = CHAT_TEMPLATE,
    noise: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model to `path`; the same arguments give the same bytes.

    noise: standard deviation, relative to the weights, of a disturbance on top of `seed`'s model:
    a draft whose best token is the target's mostly (0.05), often (0.1) or hardly ever (1.0).
    metadata: further keys; a key already there is replaced, and a value of None takes it out.
    """
    writer = GGUFWriter(None, architecture)
    values = {
        **model_metadata(architecture, n_layers, context_length, vocab_size),
        **tokenizer_metadata(vocab_size),
        "tokenizer.chat_template": chat_template,
        **(metadata or {}),
    }
    for key, value in values.items():
        if value is not None:
            writer.add_key_value(key, *typed(value))
    for name, weights in tensors(seed, n_layers, vocab_size, noise):
        writer.add_tensor(name, weights)
    writer.write_header_to_file(Path(path))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def model_metadata(
    architecture: str, n_layers: int, context_length: int, vocab_size: int
) -> dict[str, Any]:
    """The keys llama.cpp needs to build the graph."""
    sizes = {
        "context_length": context_length,
        "embedding_length": WIDTH,
        "block_count": n_layers,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_SIZE,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab_size,
    }
    general = {"general.name": "tiny random llama", "general.file_type": 0}
    return {**general, **{f"{architecture}.{key}": value for key, value in sizes.items()}}


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE vocabulary of `vocab_size` pieces, control tokens last."""
    pieces = list(byte_pieces())
    merges = list(islice(letter_merges(), max(0, vocab_size - len(pieces) - len(CONTROL_TOKENS))))
    pieces += [merge.replace(" ", "") for merge in merges]
    types = [int(TokenType.NORMAL)] * len(pieces) + [int(TokenType.CONTROL)] * len(CONTROL_TOKENS)
    pieces += CONTROL_TOKENS
    if len(pieces) != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} pieces cannot be made")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocab_size - 4,
        "tokenizer.ggml.eos_token_id": vocab_size - 3,
        "tokenizer.ggml.eot_token_id": vocab_size - 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def byte_pieces() -> Iterator[str]:
    """The 256 characters by which GPT-2's vocabulary writes bytes, in byte order."""
    shifted = 256
    for byte in range(256):
        if ord("!") <= byte <= ord("~") or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte)
        else:
            yield chr(shifted)
            shifted += 1


def letter_merges() -> Iterator[str]:
    """Merge rules, most useful first: two letters, space and letter, then three letters."""
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    yield from (f"{a} {b}" for a, b in product(letters, repeat=2))
    yield from (f"Ġ {a}" for a in letters)
    yield from (f"{a}{b} {c}" for a, b, c in product(letters, repeat=3))


def typed(value: Any) -> tuple[Any, GGUFValueType]:
    """A value with the GGUF type that converters give it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
    return value, GGUFValueType.get_type(value)


def tensors(
    seed: int, n_layers: int, vocab_size: int, noise: float
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The F32 weights by name, scaled so that activations keep their size from layer to layer."""
    base, disturbance = np.random.default_rng(seed), np.random.default_rng((seed, 1))

    def normal(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        weights = base.normal(size=(rows, columns))
        weights += noise * disturbance.normal(size=(rows, columns))
        return (weights * scale / np.sqrt(1 + noise**2)).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    yield "token_embd.weight", normal(vocab_size, WIDTH, 1.0)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", ones
        yield block + "attn_q.weight", normal(NUM_HEADS * HEAD_SIZE, WIDTH, WIDTH**-0.5)
        yield block + "attn_k.weight", normal(NUM_KV_HEADS * HEAD_SIZE, WIDTH, WIDTH**-0.5)
        yield block + "attn_v.weight", normal(NUM_KV_HEADS * HEAD_SIZE, WIDTH, WIDTH**-0.5)
        yield block + "attn_output.weight", normal(WIDTH, NUM_HEADS * HEAD_SIZE, WIDTH**-0.5)
        yield block + "ffn_norm.weight", ones
        yield block + "ffn_gate.weight", normal(FEED_FORWARD, WIDTH, WIDTH**-0.5)
        yield block + "ffn_up.weight", normal(FEED_FORWARD, WIDTH, WIDTH**-0.5)
        yield block + "ffn_down.weight", normal(WIDTH, FEED_FORWARD, FEED_FORWARD**-0.5)
    yield "output_norm.weight", ones
    # Hidden states leave the norm with unit size: logits with a standard deviation of about 2.4.
    yield "output.weight", normal(vocab_size, WIDTH, 0.3)
