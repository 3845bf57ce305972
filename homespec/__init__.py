"""homespec: exact speculative decoding over llama.cpp.

import homespec

with homespec.load("target.gguf", draft="draft.gguf") as engine:
    result = engine.generate("Why is the sky blue?", max_tokens=200)
    print(result.text, result.stats.decode_tokens_per_second)

    for chunk in engine.stream("And at sunset?"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from homespec.errors import HomespecError

if TYPE_CHECKING:
    from homespec.decoding.sampling import SamplingParams
    from homespec.engine import Engine, LoadParams, load
    from homespec.generation import Chunk, GenerateParams, Generation, Result

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "Engine",
    "GenerateParams",
    "Generation",
    "HomespecError",
    "LoadParams",
    "Result",
    "SamplingParams",
    "load",
]

_HOMES = {
    "SamplingParams": "homespec.decoding.sampling",
    "Engine": "homespec.engine",
    "LoadParams": "homespec.engine",
    "load": "homespec.engine",
    "Chunk": "homespec.generation",
    "GenerateParams": "homespec.generation",
    "Generation": "homespec.generation",
    "Result": "homespec.generation",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: `homespec --help` should not wait for llama.cpp.
    if name not in _HOMES:
        raise AttributeError(f"module 'homespec' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only needed here

    return getattr(importlib.import_module(_HOMES[name]), name)
