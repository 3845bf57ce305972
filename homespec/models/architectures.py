"""What llama.cpp knows about an architecture and the GGUF file does not say."""

from __future__ import annotations

import enum

# Encoders for embeddings and ranking: llama.cpp gives them no cache.
ENCODERS = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "t5encoder",
    }
)
# These write, but need an encoder's pass over the prompt first.
ENCODER_DECODERS = frozenset({"t5"})
# These fill in a whole text in several passes instead of writing token by token.
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
# These read the hidden state of another model.
DRAFT_HEADS = frozenset({"dflash", "eagle3", "gemma4-assistant"})
# These make or read sound and pictures.
NOT_TEXT = frozenset({"clip", "pockettts", "qwen3tts", "wavtokenizer-dec"})

RECURRENT = frozenset({"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"})
HYBRID = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "falcon-h1",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "minimax-01",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
    }
)


class CacheKind(enum.Enum):
    """What a model keeps of the tokens it has seen."""

    ATTENTION = "attention"  # keys and values of each token: the last ones can be dropped
    RECURRENT = "recurrent"  # a state that cannot be turned back
    HYBRID = "hybrid"  # both
    NONE = "none"


def cache_kind(architecture: str) -> CacheKind:
    """What llama.cpp allocates for it; unknown architectures count as attention."""
    if architecture in RECURRENT:
        return CacheKind.RECURRENT
    if architecture in HYBRID:
        return CacheKind.HYBRID
    if not writes_text(architecture) and architecture not in ENCODER_DECODERS | DRAFT_HEADS:
        return CacheKind.NONE
    return CacheKind.ATTENTION


def why_not_text(architecture: str) -> str | None:
    """What it is instead of a model that writes text token by token; None where it is one."""
    if architecture in ENCODERS:
        return "an encoder-only model for embeddings, which writes no text"
    if architecture in ENCODER_DECODERS:
        return "an encoder-decoder model, which homespec does not run"
    if architecture in DIFFUSION:
        return "a diffusion model, which does not write token by token"
    if architecture in DRAFT_HEADS:
        return "a draft head, which works only on top of the model it was made for"
    if architecture in NOT_TEXT:
        return "a part for pictures or sound, not a language model"
    return None


def writes_text(architecture: str) -> bool:
    """Whether it writes text token by token; unknown architectures are left to llama.cpp."""
    return why_not_text(architecture) is None
