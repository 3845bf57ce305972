"""The loop against plain decoding: every depth, every acceptance pattern, and both caches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from homespec.decoding.depth import FixedDepth
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.speculative import SpeculativeDecoder, common_prefix_length
from homespec.decoding.types import Drafter, FinishReason
from homespec.decoding.verify import RULES
from homespec.drafters import DraftModelDrafter, NgramDrafter, NoDrafter
from homespec.errors import ContextFullError, UsageError

from tests.fakes import FakeModel, FakeSampler, ScriptedDrafter, hashed_logits

N_VOCAB = 16
PROMPT = [1, 2, 3, 4, 5]
LOGITS = hashed_logits(N_VOCAB)


def decoder(
    drafter: Drafter | None = None,
    depth: int = 0,
    *,
    target: FakeModel | None = None,
    rule: str = "greedy",
    params: SamplingParams | None = None,
    end_tokens: frozenset[int] = frozenset(),
    seed: int = 0,
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target or FakeModel(LOGITS),
        drafter or NoDrafter(),
        FakeSampler(params),
        RULES[rule],
        FixedDepth(depth),
        random.Random(seed).random,
        end_tokens,
    )


def run(one: SpeculativeDecoder, max_tokens: int | None = 24, batch_size: int = 512) -> list[int]:
    """The new tokens; after every round the cache holds all committed tokens but the last."""
    out: list[int] = []
    for finished in one.generate(PROMPT, max_tokens, batch_size):
        out += finished.tokens
        assert one.committed == PROMPT + out
        held = len(one.target.tokens)
        assert one.target.tokens == one.committed[:held]
        assert held == len(one.committed) - 1
    return out


PLAIN = run(decoder())


@pytest.mark.parametrize("depth", range(9))
@pytest.mark.parametrize(
    "pattern", [p for n in (1, 2, 3) for p in itertools.product([True, False], repeat=n)], ids=str
)
def test_greedy_text_is_plain_text(depth: int, pattern: tuple[bool, ...]) -> None:
    drafter = ScriptedDrafter(lambda tokens: int(np.argmax(LOGITS(tokens))), pattern)
    one = decoder(drafter, depth)
    assert run(one) == PLAIN
    assert one.finish_reason is FinishReason.LENGTH
    assert one.stats.num_tokens == len(PLAIN)
    assert one.sampler.accepted == PLAIN
    if pattern == (True,):
        assert one.stats.num_rounds == -(-(len(PLAIN) - 1) // (depth + 1))


@pytest.mark.parametrize("depth", range(9))
@pytest.mark.parametrize("alike", [True, False])
def test_a_draft_model_keeps_its_cache_in_line(depth: int, alike: bool) -> None:
    draft = FakeModel(LOGITS if alike else hashed_logits(N_VOCAB, seed=1))
    one = decoder(DraftModelDrafter(draft, FakeSampler()), depth)
    assert run(one) == PLAIN
    shared = common_prefix_length(draft.tokens, one.committed)
    assert len(draft.tokens) - shared <= depth  # at most the last draft is not committed
    if depth and alike:
        assert one.stats.acceptance_rate == 1


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_an_ngram_draft_changes_nothing_but_the_number_of_rounds(depth: int) -> None:
    def periodic(tokens: list[int]) -> np.ndarray:
        return np.eye(N_VOCAB)[(tokens[-1] + 1) % 5] * 9

    plain = run(decoder(target=FakeModel(periodic)))
    one = decoder(NgramDrafter(), depth, target=FakeModel(periodic))
    assert run(one) == plain
    assert one.stats.num_rounds < len(plain) - 1


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_seeded_match_text_is_seeded_plain_text(depth: int) -> None:
    params = SamplingParams(temperature=0.8)
    plain = run(decoder(rule="match", params=params, seed=7))
    drafter = DraftModelDrafter(FakeModel(hashed_logits(N_VOCAB, seed=1)), FakeSampler(params))
    assert run(decoder(drafter, depth, rule="match", params=params, seed=7)) == plain


def test_an_end_token_inside_a_block_ends_it_there() -> None:
    end = PLAIN[9]
    expected = PLAIN[: PLAIN.index(end) + 1]
    for depth in range(9):
        drafter = ScriptedDrafter(lambda tokens: int(np.argmax(LOGITS(tokens))), [True])
        one = decoder(drafter, depth, end_tokens=frozenset({end}))
        assert run(one) == expected
        assert one.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", range(9))
def test_a_full_context_ends_with_length(depth: int) -> None:
    """A draft of 8 with fewer slots left is cut, not a crash."""
    drafter = ScriptedDrafter(lambda tokens: int(np.argmax(LOGITS(tokens))), [True])
    one = decoder(drafter, depth, target=FakeModel(LOGITS, n_ctx=12))
    out = run(one, max_tokens=None)
    assert len(PROMPT) + len(out) == 12 + 1  # the last token is never evaluated
    assert out == PLAIN[: len(out)]
    assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_the_budget_is_kept_exactly(budget: int) -> None:
    drafter = ScriptedDrafter(lambda tokens: int(np.argmax(LOGITS(tokens))), [True])
    assert run(decoder(drafter, 8), budget) == PLAIN[:budget]


def test_a_draft_with_a_smaller_context_goes_quiet() -> None:
    draft = FakeModel(LOGITS, n_ctx=10)
    one = decoder(DraftModelDrafter(draft, FakeSampler()), 4)
    assert run(one) == PLAIN
    assert 0 < one.stats.num_drafted < len(PLAIN)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_a_prompt_is_read_in_chunks_and_reused(batch_size: int) -> None:
    target = FakeModel(LOGITS)
    assert run(decoder(target=target), batch_size=batch_size) == PLAIN
    again = decoder(target=target)
    assert run(again) == PLAIN
    assert again.stats.num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("failing_pass", [2, 3, 5])
def test_an_interrupted_round_leaves_the_cache_as_it_was(failing_pass: int) -> None:
    target = FakeModel(LOGITS)
    drafter = ScriptedDrafter(lambda tokens: int(np.argmax(LOGITS(tokens))), [True, False])
    target.fail_at = failing_pass
    one = decoder(drafter, 3, target=target)
    with pytest.raises(KeyboardInterrupt):
        run(one)
    assert target.tokens == one.committed[:-1]
    target.fail_at = None
    assert run(decoder(target=target)) == PLAIN


def test_prompts_that_cannot_be_decoded_are_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        next(decoder().generate([]))
    with pytest.raises(ContextFullError, match=r"65 tokens.*holds 64"):
        next(decoder().generate([1] * 65))
    with pytest.raises(UsageError, match="at least 1"):
        next(decoder().generate(PROMPT, 0))


def test_common_prefix_length() -> None:
    assert common_prefix_length([], [1]) == 0
    for n in range(20):
        left = list(range(20))
        right = list(range(n)) + [99] * (20 - n)
        assert common_prefix_length(left, right) == n
        assert common_prefix_length(left[:n], left) == n


def test_the_parts_of_the_time_add_up() -> None:
    one = decoder(ScriptedDrafter(lambda t: int(np.argmax(LOGITS(t))), [True, False]), 4)
    run(one)
    stats = one.stats
    parts = stats.prompt_seconds + stats.draft_seconds + stats.verify_seconds
    assert parts + stats.sample_seconds + stats.other_seconds == pytest.approx(stats.total_seconds)
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    assert sum(stats.accepted_by_position) == stats.num_accepted
    assert sum(stats.drafted_by_position) == stats.num_drafted
