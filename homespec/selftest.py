"""What is tried in a child process, since a bad build of llama.cpp dies instead of raising.

`python -m homespec.selftest MODEL SETTINGS` prints a JSON object a stage, so that whoever started
it knows how far it came. SETTINGS are fields of ContextParams, `gpu_layers`, `repack` and
`exact_kernels`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from homespec.decoding.stats import clock
from homespec.errors import HomespecError
from homespec.llama.context import Context, ContextParams
from homespec.llama.devices import cpu_features, cpu_name, devices, num_threads
from homespec.llama.library import (
    build_features,
    has_own_kernels,
    leave_tiled_kernels,
    use_exact_kernels,
    version,
)
from homespec.llama.model import ALL_LAYERS, Model
from homespec.planning import local_header, suits_own_kernels
from homespec.tuning.invariance import probe_widths

STAGES = ("library", "load", "decode", "widths")


def main() -> None:
    """Run all stages; exit 0 when they passed, 1 with an `error` object when one raised."""
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    repack, exact = settings.pop("repack", None), settings.pop("exact_kernels", False)
    gpu_layers = settings.pop("gpu_layers", ALL_LAYERS)
    try:
        _say("library", **_library())
        if exact:
            use_exact_kernels()
        elif repack is None and suits_own_kernels(local_header(Path(path))):
            repack = not leave_tiled_kernels()  # as a load does it that was not tuned
        with Model(path, gpu_layers=gpu_layers, repack=repack is not False) as model:
            _say("load", description=model.description, size_bytes=model.size_bytes)
            with Context(model, ContextParams(n_ctx=640, **settings)) as context:
                _say("decode", **_decode(context))
                report = probe_widths(context)
                _say("widths", invariant=report.invariant, largest=report.largest)
    except HomespecError as exc:
        _say("error", message=exc.message, hint=exc.hint)
        sys.exit(1)


def _library() -> dict[str, Any]:
    return {
        "version": version(),
        "build_features": build_features(),
        "own_kernels": has_own_kernels(),
        "devices": [asdict(device) for device in devices()],
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "threads": num_threads(),
    }


def _decode(context: Context) -> dict[str, Any]:
    """A prompt in one pass (matrix kernels), then tokens one by one (vector kernels)."""
    began = clock()
    context.extend(list(range(100, 228)), 1)
    prompt_seconds, began = clock() - began, clock()
    for token in range(16):
        [row] = context.extend([token + 100], 1)
    seconds = clock() - began
    finite = bool((abs(row.logits) < 1e6).all())
    return {
        "finite": finite,
        "prompt_tokens_per_second": 128 / prompt_seconds,
        "tokens_per_second": 16 / seconds,
    }


def _say(stage: str, **facts: Any) -> None:
    print(json.dumps({"stage": stage, **facts}), flush=True)


if __name__ == "__main__":
    main()
