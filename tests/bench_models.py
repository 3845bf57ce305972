"""An engine on the tiny pair, and a run of the bench on it, for the tests of the bench."""

from __future__ import annotations

from pathlib import Path

from homespec.bench.arms import parse_arms
from homespec.bench.prompts import Prompt
from homespec.bench.records import BenchResult
from homespec.bench.runner import BenchParams, run
from homespec.engine import Engine, LoadParams

PROMPTS = [
    Prompt(f"{category} {i}", category, ({"role": "user", "content": f"{text} {i}"},))
    for category, text in (("chat", "Hello"), ("code", "def f(x):"))
    for i in range(5)
]


def tiny_bench_engine(tiny: Path, tiny_draft: Path) -> Engine:
    return Engine(tiny, tiny_draft, LoadParams(n_ctx=512, threads=1, tuned=False))


def tiny_run(engine: Engine, *arms: str, **params: object) -> BenchResult:
    settings = BenchParams(**{"max_tokens": 24, **params})  # type: ignore[arg-type]
    return run(engine, parse_arms(arms), PROMPTS, settings, load_seconds=0.1)
