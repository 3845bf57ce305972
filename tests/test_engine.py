"""The Python API on real models: text, stops, limits, caches, errors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import homespec
import pytest
from homespec import planning
from homespec.decoding.types import FinishReason
from homespec.engine import Engine, LoadParams
from homespec.errors import (
    ContextFullError,
    IncompatiblePairError,
    ModelError,
    PlanError,
    RefusedError,
    UsageError,
)

from tests.tiny_gguf import write_tiny_gguf

GREEDY = homespec.SamplingParams(temperature=0)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_speculation_changes_no_word(tiny_engine: Engine, kind: str, depth: int) -> None:
    plain = tiny_engine.generate("Hello", sampling=GREEDY, spec_type="none", max_tokens=80)
    spec = tiny_engine.generate(
        "Hello", sampling=GREEDY, spec_type=kind, depth="fixed", draft_depth=depth, max_tokens=80
    )
    assert spec.tokens == plain.tokens
    assert spec.stats.num_rounds <= plain.stats.num_rounds
    if kind == "draft_model":
        assert 0 < spec.stats.num_accepted < spec.stats.num_drafted


def test_both_caches_hold_the_history(tiny_engine: Engine) -> None:
    prompt = tiny_engine.encode("Hello")
    result = tiny_engine.generate(
        prompt, sampling=GREEDY, depth="fixed", draft_depth=4, max_tokens=50
    )
    history = [*prompt, *result.tokens]
    assert tiny_engine.context.tokens == history[: len(tiny_engine.context.tokens)]
    assert len(history) - len(tiny_engine.context.tokens) <= 1
    assert tiny_engine.draft_context is not None
    draft = tiny_engine.draft_context.tokens
    agreed = sum(1 for a, b in zip(draft, history, strict=False) if a == b)
    assert agreed >= len(draft) - 4


def test_streamed_text_is_whole_text(tiny_engine: Engine) -> None:
    generation = tiny_engine.stream("Grüße 🙂", sampling=GREEDY, max_tokens=60)
    streamed = "".join(chunk.text for chunk in generation)
    assert streamed == generation.result.text
    assert generation.result.text == tiny_engine.tokenizer.decode(generation.result.tokens)


def test_accepted_chunks_are_the_accepted_tokens(tiny_engine: Engine) -> None:
    generation = tiny_engine.stream(
        "Hello", sampling=GREEDY, depth="fixed", draft_depth=4, max_tokens=60
    )
    accepted = sum(chunk.accepted for chunk in generation)
    assert 0 < accepted <= generation.result.stats.num_accepted


@pytest.mark.parametrize("depth", [0, 1, 4, 16])
def test_a_seed_repeats_whatever_was_drafted(tiny_engine: Engine, depth: int) -> None:
    sampling = homespec.SamplingParams(seed=11)
    drawn = tiny_engine.generate("Hello", sampling=sampling, max_tokens=60)
    again = tiny_engine.generate(
        "Hello", sampling=sampling, max_tokens=60, depth="fixed", draft_depth=depth
    )
    assert again.tokens == drawn.tokens


def test_a_drawn_seed_is_told(tiny_engine: Engine) -> None:
    drawn = tiny_engine.generate("Hello", max_tokens=30, rule="match")
    again = tiny_engine.generate(
        "Hello", sampling=homespec.SamplingParams(seed=drawn.seed), max_tokens=30
    )
    assert again.tokens == drawn.tokens


@pytest.mark.parametrize("depth", [0, 1, 4, 16])
def test_a_stop_string_cuts_text_ids_and_cache(tiny_engine: Engine, depth: int) -> None:
    full = tiny_engine.generate("Hello", sampling=GREEDY, max_tokens=60)
    stop = full.text[20:26]
    prompt = tiny_engine.encode("Hello")
    cut = tiny_engine.generate(
        prompt, sampling=GREEDY, max_tokens=60, stop=(stop,), depth="fixed", draft_depth=depth
    )
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.tokens == full.tokens[: len(cut.tokens)]
    assert len(tiny_engine.context.tokens) <= len(prompt) + len(cut.tokens)
    assert tiny_engine.generate("Hello", sampling=GREEDY, max_tokens=60).tokens == full.tokens


def test_leaving_early_keeps_what_came(tiny_engine: Engine) -> None:
    full = tiny_engine.generate("Hello", sampling=GREEDY, max_tokens=60)
    generation = tiny_engine.stream("Hello", sampling=GREEDY, max_tokens=60)
    for number, _ in enumerate(generation):
        if number == 5:
            break
    generation.cancel()
    assert generation.result.finish_reason is FinishReason.CANCELLED
    assert full.text.startswith(generation.result.text)
    assert generation.result.text
    assert tiny_engine.generate("Hello", sampling=GREEDY, max_tokens=60).tokens == full.tokens


def test_ignore_eos_runs_to_the_budget(starter_engine: Engine) -> None:
    short = starter_engine.generate("Say: ok", sampling=GREEDY, max_tokens=60)
    assert short.finish_reason is FinishReason.STOP
    long = starter_engine.generate("Say: ok", sampling=GREEDY, max_tokens=60, ignore_eos=True)
    assert len(long.tokens) == 60
    assert not set(long.tokens) & starter_engine.tokenizer.end_tokens


def test_the_context_is_filled_to_the_end(tiny: Path, tiny_draft: Path) -> None:
    for depth in (0, 3, 16):
        with Engine(tiny, tiny_draft, LoadParams(n_ctx=64)) as engine:
            prompt = engine.encode("Hello")
            result = engine.generate(
                prompt, sampling=GREEDY, depth="fixed", draft_depth=depth, ignore_eos=True
            )
            assert len(prompt) + len(result.tokens) == 65
            assert result.finish_reason is FinishReason.LENGTH
            assert len(engine.context.tokens) == 64


def test_a_grammar_holds_with_speculation(starter_engine: Engine) -> None:
    sampling = homespec.SamplingParams(seed=3, grammar='root ::= ("yes " | "no ")+ "."')
    for depth in (0, 4):
        result = starter_engine.generate(
            "Answer.", sampling=sampling, depth="fixed", draft_depth=depth, max_tokens=30
        )
        assert re.fullmatch(r"(yes |no )+\.?(y|ye|n|yes|no)?", result.text)


def test_penalties_see_the_same_history_with_and_without_drafts(tiny_engine: Engine) -> None:
    sampling = homespec.SamplingParams(temperature=0, repeat_penalty=1.3, repeat_last_n=64)
    plain = tiny_engine.generate("Hello", sampling=sampling, spec_type="none", max_tokens=60)
    for kind in ("ngram", "draft_model"):
        spec = tiny_engine.generate(
            "Hello", sampling=sampling, spec_type=kind, depth="fixed", draft_depth=5, max_tokens=60
        )
        assert spec.tokens == plain.tokens


def test_the_seconds_add_up(starter_engine: Engine) -> None:
    stats = starter_engine.generate("Count to ten.", sampling=GREEDY, max_tokens=60).stats
    parts = stats.prompt_seconds + stats.draft_seconds + stats.verify_seconds
    assert parts + stats.sample_seconds <= stats.total_seconds
    assert stats.other_seconds < 0.05 * stats.total_seconds
    assert stats.peak_memory_bytes is not None


def test_prompts_that_cannot_be_answered(tiny_engine: Engine) -> None:
    for empty in ("", "  \n"):
        with pytest.raises(UsageError, match="empty"):
            tiny_engine.generate(empty)
    with pytest.raises(ContextFullError, match=r"\d+ tokens, but the context holds 256"):
        tiny_engine.generate("word " * 500)


def test_options_are_checked(tiny_engine: Engine) -> None:
    for bad in (
        {"max_token": 3},
        {"max_tokens": 0},
        {"spec_type": "magic"},
        {"draft_depth": 99},
        {"rule": "hope"},
        {"draft_sampling": "loud"},
        {"stop": ("",)},
    ):
        with pytest.raises(UsageError):
            tiny_engine.generate("Hello", **bad)
    with pytest.raises(UsageError, match="n_cxt"):
        homespec.load("x.gguf", n_cxt=5)


def test_files_that_are_no_model(tmp_path: Path, tiny: Path) -> None:
    whole = tiny.read_bytes()
    cases = {
        "text.gguf": b"hello, I am no model",
        "empty.gguf": b"",
        "head.gguf": whole[:600],
        "tail.gguf": whole[:-5000],
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError) as caught:
            homespec.load(tmp_path / name)
        assert name in caught.value.message
        assert caught.value.hint
    with pytest.raises(UsageError, match="no file"):
        homespec.load(tmp_path / "missing.gguf")
    with pytest.raises(ModelError):
        homespec.load(write_tiny_gguf(tmp_path / "bert.gguf", architecture="bert"))
    with pytest.raises(ModelError, match="nonsense"):
        homespec.load(write_tiny_gguf(tmp_path / "arch.gguf", architecture="nonsense"))


def test_a_model_without_a_template_continues_raw_text(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "base.gguf", chat_template=None)
    with homespec.load(path, n_ctx=128) as engine:
        with pytest.raises(ModelError, match="no chat template"):
            engine.generate("Hello")
        assert engine.generate("Hello", raw=True, max_tokens=5, sampling=GREEDY).tokens


def test_a_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    path = write_tiny_gguf(tmp_path / "picky.gguf", chat_template=template)
    with (
        homespec.load(path, n_ctx=128) as engine,
        pytest.raises(RefusedError, match="roles must alternate"),
    ):
        engine.generate("Hello")


def test_a_draft_of_another_family_is_refused(tiny: Path, starter: Path) -> None:
    with pytest.raises(IncompatiblePairError) as caught:
        homespec.load(starter, tiny)
    assert caught.value.exit_code == 3


def test_a_draft_with_a_shorter_vocabulary_drafts(tiny: Path, tmp_path: Path) -> None:
    """Padding ids beyond the shorter vocabulary are q = 0, not a mismatch."""
    padded = write_tiny_gguf(tmp_path / "padded.gguf", vocab_size=300)
    with homespec.load(padded, tiny, n_ctx=128) as engine:
        result = engine.generate("Hello", sampling=GREEDY, max_tokens=20)
        assert result.stats.num_drafted > 0


def test_the_public_names_are_there() -> None:
    for name in homespec.__all__:
        assert getattr(homespec, name) is not None
    with pytest.raises(AttributeError):
        _ = homespec.nonsense


def test_a_draft_that_does_not_fit_is_left_out(
    tiny: Path,
    tiny_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory for the target alone: the draft gives way, in a sentence; then the target does too."""
    roomy = planning.this_machine()
    params = LoadParams(n_ctx=256, threads=1, reserve_bytes=0)
    header = planning.local_header(tiny)
    alone = planning.plan_for(header, [], planning.request_for(params), machine=roomy).total_bytes
    monkeypatch.setattr(
        planning,
        "this_machine",
        lambda: replace(roomy, limits=(replace(roomy.limits[0], free_bytes=alone + (1 << 20)),)),
    )
    with Engine(tiny, tiny_draft, params) as engine:
        assert engine.draft_context is None
        assert engine.generate("Hello", sampling=GREEDY, max_tokens=5).tokens
    assert "does not fit" in caplog.text
    with pytest.raises(PlanError):
        Engine(tiny, None, replace(params, n_ctx=512, cache_type_k="f32", cache_type_v="f32"))
