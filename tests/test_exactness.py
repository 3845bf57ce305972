"""The promise on real models: the same text bit for bit, and the same distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from homespec.decoding.depth import FixedDepth
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.speculative import SpeculativeDecoder
from homespec.decoding.types import Distribution, Draft, Round
from homespec.decoding.verify import RULES
from homespec.engine import Engine, LoadParams
from homespec.errors import RefusedError
from homespec.llama.context import Context, ContextParams
from homespec.llama.model import Model
from homespec.llama.sampler import SamplerChain
from homespec.tuning.invariance import probe_widths, require_invariant
from scipy import stats

from tests.conftest import PairFiles

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.8, seed=11)

CODE = '''Rename the parameter `n` to `count` and return the whole function:

def first_primes(n):
    """Return the first n prime numbers."""
    primes = []
    candidate = 2
    while len(primes) < n:
        if all(candidate % prime for prime in primes):
            primes.append(candidate)
        candidate += 1
    return primes
'''
PROMPTS = ["Name three rivers in Europe and a city on each of them.", CODE]


def long_prompt(engine: Engine) -> list[int]:
    """More than 1,000 tokens, past the 512 cells where llama.cpp changes its kernel."""
    tokens = engine.encode(CODE)
    return (tokens * (1 + 1100 // len(tokens)))[:1100]


def texts(
    engine: Engine,
    sampling: SamplingParams,
    kinds: Sequence[str],
    depths: Sequence[int],
    max_tokens: int = 40,
):
    """(plain tokens, speculative tokens, what was run) for each prompt, kind and depth."""
    rule = None if sampling.greedy else "match"
    for prompt in [*PROMPTS, long_prompt(engine)]:

        def run(kind: str, depth: int, prompt: Any = prompt):
            return engine.generate(
                prompt,
                sampling=sampling,
                spec_type=kind,
                depth="fixed",
                draft_depth=depth,
                rule=rule,
                max_tokens=max_tokens,
            )

        plain = run("none", 0)
        for kind in kinds:
            for depth in depths:
                yield plain, run(kind, depth), (str(prompt)[:20], kind, depth)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded match"])
def test_starter_text_is_plain_text_bit_for_bit(
    starter_engine: Engine, sampling: SamplingParams
) -> None:
    if not probe_widths(starter_engine.context).invariant:
        pytest.skip("on this machine these settings are not width-invariant")
    drafted = 0
    depths = [1, 2, 5, 16] if sampling.greedy else [3, 16]
    for plain, spec, what in texts(starter_engine, sampling, ["ngram"], depths):
        assert spec.tokens == plain.tokens, what
        assert spec.text == plain.text
        drafted += spec.stats.num_drafted
    assert drafted > 20


@pytest.mark.parametrize(("flash", "type_v"), [("on", "bf16"), ("off", "f16")])
def test_strictly_exact_is_refused_where_a_short_look_finds_other_bits(
    starter: Path, flash: str, type_v: str
) -> None:
    params = ContextParams(n_ctx=2048, flash_attention=flash, cache_type_v=type_v)
    with Model(starter, repack=False) as model:
        with Context(model, params) as context:
            invariant = probe_widths(context, (64,), (2, 16)).invariant
        if invariant:
            require_invariant(model, params)
            return
        with pytest.raises(RefusedError, match="other bits") as caught:
            require_invariant(model, params)
    assert "-ngl 0" in str(caught.value.hint)


def test_pair_text_is_plain_text_bit_for_bit(pair: PairFiles) -> None:
    params = LoadParams(n_ctx=2048, strict_exact=True)
    with Engine(pair.target, pair.draft, params) as engine:
        if not probe_widths(engine.context).invariant:
            pytest.skip("on this machine these settings are not width-invariant")
        for sampling, depth in ((GREEDY, 9), (SEEDED, 3)):
            kinds = ["draft_model", "ngram"]
            for plain, spec, what in texts(engine, sampling, kinds, [depth], max_tokens=16):
                assert spec.tokens == plain.tokens, (what, sampling)


class Recorded:
    """A real target that computes each history once: 20,000 draws then take seconds.

    Its rows are (history) keys; `RecordedSampler` turns them into the chain's distributions.
    """

    def __init__(self, engine: Engine) -> None:
        self.context, self.n_ctx = engine.context, engine.context.n_ctx
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int], num_rows: int) -> list[tuple[int, ...]]:
        self.tokens.extend(tokens)
        end = len(self.tokens)
        return [tuple(self.tokens[: end - i]) for i in reversed(range(num_rows))]

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class RecordedSampler:
    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.engine, self.chain = engine, SamplerChain(engine.model, params)
        self.known: dict[tuple[int, ...], Distribution] = {}

    def distribution(self, row: tuple[int, ...]) -> Distribution:
        if row not in self.known:
            self.engine.context.clear()
            [logits] = self.engine.context.extend(list(row), 1)
            self.known[row] = self.chain.distribution(logits)
        return self.known[row]

    def prime(self, prompt: Sequence[int]) -> None: ...

    def accept(self, token: int) -> None: ...


class TestDrafter:
    """Samples two tokens from q, which it makes from the target's own p."""

    __test__ = False
    name = "test"

    def __init__(
        self,
        sampler: RecordedSampler,
        distort: Callable[[Distribution], Distribution],
        uniform: Callable[[], float],
    ) -> None:
        self.sampler, self.distort, self.uniform = sampler, distort, uniform
        self.known: dict[tuple[int, ...], Distribution] = {}

    def propose(self, committed: Sequence[int], max_tokens: int) -> Draft:
        history, qs = list(committed), []
        for _ in range(max_tokens):
            row = tuple(history)
            if row not in self.known:
                self.known[row] = self.distort(self.sampler.distribution(row))
            q = self.known[row]
            history.append(q.sample(self.uniform()))
            qs.append(q)
        return Draft(tuple(history[len(committed) :]), tuple(qs), self.name)

    def observe(self, finished: Round) -> None: ...


def wrong(p: Distribution) -> Distribution:
    """The likeliest tokens get the least."""
    return Distribution(p.ids, np.sort(p.probabilities)[np.argsort(-np.argsort(p.probabilities))])


def half_right(p: Distribution) -> Distribution:
    """A draw from p or from its opposite."""
    return Distribution(p.ids, (p.probabilities + wrong(p).probabilities) / 2)


DRAWS = 20_000


@pytest.mark.parametrize(
    ("rule", "distort"),
    [
        ("rejection", lambda p: p),
        ("rejection", wrong),
        ("rejection", half_right),
        ("match", half_right),
    ],
    ids=["right", "wrong", "half right", "match, half right"],
)
def test_two_drawn_tokens_follow_the_target(
    starter_engine: Engine, rule: str, distort: Callable[[Distribution], Distribution]
) -> None:
    """Chi-square of 20,000 draws against the probabilities of direct sampling, temperature 1."""
    params = SamplingParams(temperature=1, top_k=12, top_p=1, min_p=0)
    sampler = RecordedSampler(starter_engine, params)
    prompt = starter_engine.encode("The weather today is", raw=True)
    target, uniform = Recorded(starter_engine), random.Random(1).random
    drafter = TestDrafter(sampler, distort, random.Random(2).random)
    decoder = SpeculativeDecoder(
        target, drafter, sampler, RULES[rule], FixedDepth(2), uniform, frozenset()
    )
    counts: dict[tuple[int, int], int] = {}
    target.extend(prompt[:-1], 0)
    for _ in range(DRAWS):
        drawn: list[int] = []
        decoder.committed = list(prompt)
        target.truncate(len(prompt) - 1)
        while len(drawn) < 2:
            drawn += decoder.round(2 - len(drawn)).tokens
        counts[drawn[0], drawn[1]] = counts.get((drawn[0], drawn[1]), 0) + 1
    expected = exact(sampler, prompt)
    assert counts.keys() <= expected.keys()
    large = {cell: p * DRAWS for cell, p in expected.items() if p * DRAWS >= 5}
    observed = [counts.get(cell, 0) for cell in large]
    rest = DRAWS - sum(large.values())
    pooled = [*large.values(), rest] if rest >= 5 else list(large.values())
    if rest >= 5:
        observed.append(DRAWS - sum(observed))
    scale = sum(observed) / sum(pooled)
    result = stats.chisquare(observed, np.array(pooled) * scale)
    assert len(pooled) > 20
    assert result.pvalue > 0.001


def exact(sampler: RecordedSampler, prompt: list[int]) -> dict[tuple[int, int], float]:
    """P(first) P(second | first), by direct evaluation."""
    first = sampler.distribution(tuple(prompt))
    cells = {}
    for a, p_a in zip(first.ids.tolist(), first.probabilities, strict=True):
        second = sampler.distribution((*prompt, a))
        for b, p_b in zip(second.ids.tolist(), second.probabilities, strict=True):
            cells[a, b] = p_a * p_b
    return cells
