"""Sampling settings, and the values of the reference filters."""

from __future__ import annotations

import numpy as np
import pytest
from homespec.decoding.sampling import SamplingParams, reference_distribution
from homespec.decoding.types import Distribution
from homespec.errors import UsageError

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def kept(**settings: float) -> list[int]:
    params = SamplingParams(temperature=1, **{**OFF, **settings})
    return sorted(reference_distribution(LOGITS, params).ids.tolist())


def test_each_filter_keeps_what_its_paper_says() -> None:
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.69) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(min_p=0.3) == [0, 1, 2]


def test_temperature_sharpens() -> None:
    sharp = reference_distribution(LOGITS, SamplingParams(temperature=0.5, **OFF))
    expected = np.array([0.4, 0.3, 0.15, 0.1, 0.05]) ** 2
    np.testing.assert_allclose(sharp.probabilities, expected / expected.sum())
    assert reference_distribution(LOGITS, SamplingParams(temperature=0)).ids.tolist() == [0]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"presence_penalty": -(10**400)},
        {"dry_base": float("inf")},
        {"dry_penalty_last_n": 2**31},
        {"top_k": 2**32 + 1},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -1},
        {"repeat_penalty": 0},
        {"seed": -2},
        {"seed": 2**32},
    ],
)
def test_values_out_of_range_are_named(bad: dict[str, float]) -> None:
    [name] = bad
    with pytest.raises(UsageError, match=name):
        SamplingParams(**bad)


def test_windows_end_with_the_context() -> None:
    params = SamplingParams(repeat_last_n=2**31 - 1, dry_penalty_last_n=7).within(100)
    assert (params.repeat_last_n, params.dry_penalty_last_n) == (100, 7)


def test_sampling_inverts_the_cumulative_sum() -> None:
    d = Distribution(np.array([7, 3], np.int32), np.array([0.25, 0.75]))
    assert [d.sample(u) for u in (0.0, 0.2499, 0.25, 0.9999999999)] == [7, 7, 3, 3]
    assert (d.probability(3), d.probability(4)) == (0.75, 0.0)


def test_a_token_without_probability_is_never_drawn() -> None:
    d = Distribution.from_logits(np.arange(3, dtype=np.int32), np.array([0.0, -np.inf, 0.0]))
    assert d.ids.tolist() == [0, 2]
    zero_first = Distribution(np.array([1, 2], np.int32), np.array([0.0, 1.0]))
    assert zero_first.sample(0.0) == 2
