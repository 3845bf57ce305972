"""The acceptance rules emit the target's distribution: shown exactly, by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import Distribution, Draft
from homespec.decoding.verify import RULES, greedy, match, rejection, residual
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeSampler

masses = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=7).filter(lambda m: sum(m) > 1e-3)


def distribution(mass: list[float]) -> Distribution:
    p = np.array(mass)
    kept = np.flatnonzero(p)
    return Distribution(kept.astype(np.int32), p[kept] / p[kept].sum())


def dense(d: Distribution, n: int) -> np.ndarray:
    full = np.zeros(n)
    full[d.ids] = d.probabilities
    return full


@given(masses, masses)
@settings(max_examples=300, deadline=None)
def test_accepting_or_resampling_gives_p_exactly(left: list[float], right: list[float]) -> None:
    """q min(1, p/q) + P(reject) residual == p, on supports that overlap or do not."""
    n = max(len(left), len(right))
    p, q = distribution(left), distribution(right)
    p_dense, q_dense = dense(p, n), dense(q, n)
    accepted = np.minimum(p_dense, q_dense)
    emitted = accepted + (1 - accepted.sum()) * dense(residual(p, q), n)
    np.testing.assert_allclose(emitted, p_dense, atol=1e-12)


class Fixed:
    """A sampler whose rows are distributions already."""

    def distribution(self, row: Distribution) -> Distribution:
        return row

    def best(self, row: Distribution) -> int:
        return int(row.ids[np.argmax(row.probabilities)])

    def prime(self, prompt: object) -> None: ...

    def accept(self, token: int) -> None: ...


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_rule_run_over_a_grid_of_uniforms_gives_p(rule: str, sampled: bool) -> None:
    """The rule's own code, with its random numbers enumerated instead of drawn."""
    p = Distribution(np.array([0, 2, 3], np.int32), np.array([0.5, 0.3, 0.2]))
    q = Distribution(np.array([0, 1, 2], np.int32), np.array([0.2, 0.5, 0.3]))
    steps = 200
    grid = (np.arange(steps) + 0.5) / steps
    emitted = np.zeros(4)
    proposals = zip(q.ids, q.probabilities, strict=True) if sampled else [(2, 1.0)]
    for token, weight in proposals:
        draft = Draft((int(token),), (q,) if sampled else None)
        for pair in itertools.product(grid, grid):
            uniforms = iter([*pair, 0.5])
            taken = RULES[rule](draft, [p, p], Fixed(), lambda u=uniforms: next(u), ())
            emitted[taken.tokens[0]] += weight / steps**2
    np.testing.assert_allclose(emitted, dense(p, 4), atol=2 / steps)


def test_greedy_keeps_the_agreeing_prefix_and_adds_one() -> None:
    rows = [np.eye(5)[i] for i in (3, 1, 4, 2)]
    sampler = FakeSampler()
    full = greedy(Draft((3, 1, 4)), rows, sampler, lambda: 0.0, ())
    assert (full.tokens, full.num_accepted) == ((3, 1, 4, 2), 3)
    part = greedy(Draft((3, 0, 4)), rows, sampler, lambda: 0.0, ())
    assert (part.tokens, part.num_accepted) == ((3, 1), 1)
    plain = greedy(Draft(), rows[:1], sampler, lambda: 0.0, ())
    assert (plain.tokens, plain.num_accepted) == ((3,), 0)
    assert sampler.accepted == [3, 1, 4, 2, 3, 1, 3]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_accepted_end_token_closes_the_block(rule) -> None:
    rows = [np.eye(5)[i] * 50 for i in (3, 1, 4, 2)]
    sampler = FakeSampler(SamplingParams(temperature=1))
    taken = rule(Draft((3, 1, 4)), rows, sampler, lambda: 0.5, {1})
    assert (taken.tokens, taken.num_accepted) == ((3, 1), 2)
    assert sampler.accepted == [3, 1]


def test_a_row_is_read_only_after_all_before_it_were_accepted() -> None:
    """Penalties and grammars stand on committed tokens: row i sees them advanced by i tokens."""
    seen: list[list[int]] = []

    class Recording(FakeSampler):
        def distribution(self, row):
            seen.append(list(self.accepted))
            return super().distribution(row)

    rows = [np.eye(5)[i] * 50 for i in (3, 1, 4)]
    for rule in (match, rejection):
        seen.clear()
        rule(Draft((3, 1)), rows, Recording(SamplingParams(temperature=1)), lambda: 0.5, ())
        assert seen == [[], [3], [3, 1]]


def test_match_uses_one_uniform_a_token() -> None:
    """So that the same seed gives plain decoding's text."""
    row = np.zeros(4)
    for drafted in ((), (0,), (0, 0, 0)):
        used = itertools.count()

        def uniform(used=used) -> float:
            next(used)
            return 0.1

        rows = [row] * (len(drafted) + 1)
        sampler = FakeSampler(SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0))
        taken = match(Draft(drafted), rows, sampler, uniform, ())
        assert next(used) == len(taken.tokens)
