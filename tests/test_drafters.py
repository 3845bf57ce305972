"""Drafters one by one, without a loop."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from homespec.decoding.depth import FixedDepth
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.speculative import SpeculativeDecoder
from homespec.decoding.types import NO_DRAFT, Round
from homespec.decoding.verify import RULES
from homespec.drafters import DRAFTERS, DraftModelDrafter, NgramDrafter
from homespec.drafters.adaptive import MATCH_PRIORS, RateTable
from homespec.drafters.answer_store import LONGEST, AnswerStore
from homespec.drafters.rated_lookup import RatedLookup
from homespec.drafters.suffix_automaton import SuffixAutomaton
from homespec.errors import UsageError

from tests.clock import fastest
from tests.fakes import FakeModel, FakeSampler, hashed_logits


def test_names_are_keys() -> None:
    assert all(cls.name == name for name, cls in DRAFTERS.items())


def test_ngram_prefers_the_longest_match_then_the_latest() -> None:
    history = [1, 2, 3, 70, 9, 2, 3, 80, 5, 1, 2, 3]
    assert NgramDrafter().propose(history, 1).tokens == (70,)
    assert NgramDrafter().propose([*history[1:8], 2, 3], 1).tokens == (80,)


def test_ngram_finds_nothing_new() -> None:
    assert NgramDrafter().propose([1, 2, 3, 4], 4).tokens == ()
    assert NgramDrafter().propose([1], 4).tokens == ()
    assert NgramDrafter(min_ngram=1).propose([1], 4).tokens == ()


def test_ngram_runs_on_into_its_own_copy() -> None:
    assert NgramDrafter().propose([1, 2, 1, 2, 1, 2], 5).tokens == (1, 2, 1, 2, 1)


def test_ngram_index_grown_or_made_anew_is_the_same() -> None:
    rng = random.Random(3)
    history = [rng.randrange(4) for _ in range(120)]
    grown = NgramDrafter()
    for end in range(1, len(history)):
        fresh = NgramDrafter()
        assert grown.propose(history[:end], 6) == fresh.propose(history[:end], 6)
    # another history: what was indexed before is forgotten
    other = [9, 8, 7, 9, 8]
    assert grown.propose(other, 2).tokens == (7, 9)
    assert grown.propose([1, 2, 3], 2).tokens == ()


def test_ngram_lengths_are_checked() -> None:
    with pytest.raises(UsageError):
        NgramDrafter(min_ngram=0)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_automaton_finds_what_a_scan_finds(alphabet: int) -> None:
    """The longest repeat, and the latest place of it, at every length of the text."""
    rng = random.Random(alphabet)
    text: list[int] = []
    index = SuffixAutomaton(reach=10_000)
    for _ in range(150):
        text.append(rng.randrange(alphabet))
        index.append(text[-1])
        assert index.longest_repeat() == scanned(text)


def scanned(text: list[int]) -> tuple[int, int]:
    size = len(text)
    for length in range(size - 1, 0, -1):
        for place in range(size - length - 1, -1, -1):
            if text[place : place + length] == text[size - length :]:
                return length, place + length
    return 0, 0


def test_a_long_text_of_one_token_takes_linear_time() -> None:
    history = [7] * 30_000
    drafter = NgramDrafter()
    assert drafter.propose(history, 32).tokens == (7,) * 32
    assert fastest(lambda: NgramDrafter().propose(history, 32), within=3) < 3
    assert drafter.match_length == LONGEST


def test_the_answer_store_finds_the_latest_place_and_stops_at_its_end() -> None:
    store = AnswerStore(ngram=3)
    store.add([1, 2, 3, 4, 5])
    store.add([9, 1, 2, 3, 6, 7])
    assert store.find([0, 1, 2, 3], 4) == (3, (6, 7))
    assert store.find([9, 1, 2, 3], 1) == (4, (6,))
    assert store.find([9, 1, 2, 3], 4, beyond=4) == (0, ())
    assert store.find([2, 3, 4], 4) == (3, (5,))
    assert store.find([3, 4, 5], 4) == (0, ())  # nothing of its own answer followed
    assert store.find([5, 9, 1], 4) == (0, ())  # nor does a match run from one into the next
    assert store.find([2, 3], 4) == (0, ())


def test_the_answer_store_forgets_the_oldest() -> None:
    store = AnswerStore(capacity=100, ngram=3)
    for number in range(40):
        store.add([number, number + 1, number + 2, 7, number])
        assert len(store._tokens) <= 100
        assert len(store._next) <= 100
    assert store.find([39, 40, 41], 2) == (3, (7, 39))
    assert store.find([0, 1, 2], 2) == (0, ())


VOCABULARY = 512


def written(answer: Sequence[int], store: AnswerStore | None) -> tuple[list[int], int, int]:
    """(tokens, drafted, accepted) of a target that says `answer`, with lookups of depth 8."""
    script = [1, 2, 3, *answer]

    def says(tokens: Sequence[int]) -> np.ndarray:
        right = list(tokens) == script[: len(tokens)]
        return np.eye(VOCABULARY)[script[len(tokens)] if right else 0]

    decoder = SpeculativeDecoder(
        target=FakeModel(says, n_ctx=1024),
        drafter=RatedLookup(RateTable(MATCH_PRIORS), answers=store),
        sampler=FakeSampler(),
        rule=RULES["greedy"],
        policy=FixedDepth(8),
        uniform=random.Random(0).random,
        end_tokens=frozenset(),
    )
    for _ in decoder.generate(script[:3], len(answer)):
        pass
    return decoder.committed[3:], decoder.stats.num_drafted, decoder.stats.num_accepted


def test_answers_that_share_passages_are_accepted_more_with_a_store() -> None:
    rng = random.Random(5)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY) for _ in range(count)]

    passage, store, alone, shared = drawn(60), AnswerStore(), [0, 0], [0, 0]
    for _ in range(10):
        answer = [*drawn(15), *passage, *drawn(15)]
        for kept, sums in ((None, alone), (store, shared)):
            tokens, drafted, accepted = written(answer, kept)
            assert tokens == answer
            sums[0] += drafted
            sums[1] += accepted
        store.add(answer)
    assert alone[1] < 10
    assert shared[1] > 9 * 45  # of 56 tokens after the first four of the passage
    assert shared[1] / shared[0] > 0.8


def test_the_longer_match_is_taken_and_learned_from() -> None:
    rates, store = RateTable(MATCH_PRIORS), AnswerStore()
    store.add([4, 5, 6, 7, 8, 9, 50, 51])
    own = [70, 6, 7, 8, 9, 60, 61, 4, 5, 6, 7, 8, 9]  # a match of 4 in its own text, 6 in the store
    lookup = RatedLookup(rates, answers=store)
    assert lookup.rates(own, 2) == [MATCH_PRIORS[6], MATCH_PRIORS[6]]
    assert lookup.propose(own, 2).tokens == (50, 51)
    longer = [3, 4, 5, 6, 7, 8, 9, 60, 61, 3, 4, 5, 6, 7, 8, 9]  # and here 7 of its own
    assert lookup.propose(longer, 2).tokens == (60, 61)


def test_lookups_are_judged_though_they_were_not_drafted() -> None:
    """What was wrong for long would never be tried again."""
    rates = RateTable(MATCH_PRIORS)
    for _ in range(30):
        rates[2].observe(False)
    lookup, text = RatedLookup(rates), [1, 2, 3, 1, 2]
    for number in range(30):
        before = rates[2].value
        assert lookup.rates(text, 4)[0] == before
        lookup.observe(Round(NO_DRAFT, (3,), 0, len(text) - 1, 1, 0.0, 0.01))
        assert rates[2].value > before
        text = [*text, 3, 100 + number, 1, 2]
    assert rates[2].value > 0.6


def peaked(tokens: list[int]) -> np.ndarray:
    """Sure of the next token while there are few, then undecided."""
    return np.eye(8)[(tokens[-1] + 1) % 8] * (9.0 if len(tokens) < 4 else 0.5)


def test_a_draft_stops_where_it_is_unsure() -> None:
    params = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    drafter = DraftModelDrafter(FakeModel(peaked), FakeSampler(params), p_min=0.5)
    assert drafter.propose([1, 2], 6).tokens == (3, 4)


def test_a_draft_ends_with_an_end_token() -> None:
    drafter = DraftModelDrafter(FakeModel(peaked), FakeSampler(), end_tokens={4})
    assert drafter.propose([1], 6).tokens == (2, 3, 4)


def test_forbidden_and_padding_ids_are_never_proposed() -> None:
    params = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    model = FakeModel(hashed_logits(8), n_ctx=4096)
    drafter = DraftModelDrafter(
        model,
        FakeSampler(params),
        uniform=random.Random(0).random,
        shared_vocabulary=6,
        forbidden=(0, 3),
    )
    draft = drafter.propose([1], 300)
    assert set(draft.tokens) == {1, 2, 4, 5}
    assert draft.distributions is not None
    for token, q in zip(draft.tokens, draft.distributions, strict=True):
        assert q.probability(token) > 0
        assert q.probabilities.sum() == pytest.approx(1)
        assert {0, 3, 6, 7}.isdisjoint(q.ids.tolist())


def test_a_sampled_draft_carries_the_q_it_was_drawn_from() -> None:
    """Over many draws the frequencies are those of q."""
    params = SamplingParams(temperature=1, top_k=3, top_p=1, min_p=0)
    uniform = random.Random(5).random
    counts = np.zeros(8)
    for _ in range(4000):
        model = FakeModel(hashed_logits(8))
        drafter = DraftModelDrafter(model, FakeSampler(params), uniform=uniform)
        draft = drafter.propose([1, 2], 1)
        counts[draft.tokens[0]] += 1
        assert draft.distributions is not None
        [q] = draft.distributions
    expected = np.zeros(8)
    expected[q.ids] = q.probabilities * 4000
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected + 1))


def test_a_history_the_draft_cannot_read_silences_it() -> None:
    model = FakeModel(hashed_logits(8))
    drafter = DraftModelDrafter(model, FakeSampler(), shared_vocabulary=6)
    assert drafter.propose([1, 7], 3).tokens == ()
    assert drafter.propose([1, 5], 3).tokens != ()
    assert 7 not in model.tokens
