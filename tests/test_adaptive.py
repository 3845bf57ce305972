"""The adaptive drafter against invented boxes and texts: seconds are computed, not waited for."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from homespec.decoding.depth import LearnedCost, Rate, best_depth
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import Draft, Round
from homespec.drafters import DraftModelDrafter, NgramDrafter
from homespec.drafters.adaptive import AdaptiveDrafter, Learned, Priors

from tests.fakes import FakeModel, FakeSampler

N_VOCAB = 64
SURE = SamplingParams(temperature=1, top_k=10, top_p=1, min_p=0)

Cost = Callable[[int], float]


def flat(n: int) -> float:
    """A GPU: sixteen tokens for little more than one."""
    return 0.05 * (1 + 0.02 * (n - 1))


def steep(n: int) -> float:
    """A small CPU: each token more costs two thirds of a pass."""
    return 0.05 * (1 + 0.66 * (n - 1))


def stepped(n: int) -> float:
    """A box where leaving one token costs much, and the next few little."""
    return {1: 0.095, 2: 0.154, 3: 0.162, 4: 0.17}.get(n, 0.17 + 0.015 * (n - 4))


def novel(tokens: Sequence[int]) -> int:
    """A text that does not repeat itself."""
    return zlib.crc32(repr(list(tokens[-4:])).encode()) % N_VOCAB


def periodic(tokens: Sequence[int]) -> int:
    """A text that says the same forty tokens again and again."""
    return zlib.crc32(bytes([len(tokens) % 40])) % N_VOCAB


class Imitator(FakeModel):
    """A draft that names the truth with chance `agreement`; its best logit is `sure`."""

    def __init__(
        self, truth: Callable[[Sequence[int]], int], agreement: float, sure: float = 4.0
    ) -> None:
        def logits(tokens: Sequence[int]) -> np.ndarray:
            rng = random.Random(zlib.crc32(repr((len(tokens), tokens[-1])).encode()))
            best = truth(tokens) if rng.random() < agreement else (truth(tokens) + 1) % N_VOCAB
            return np.eye(N_VOCAB)[best] * sure

        super().__init__(logits, n_ctx=10_000)


def simulate(
    drafter: AdaptiveDrafter,
    truth: Callable[[Sequence[int]], int],
    cost: Cost,
    *,
    draft_cost: float = 0.0,
    num_tokens: int = 400,
    prompt: int = 20,
) -> float:
    """Seconds of decoding, relative to plain decoding of as many tokens."""
    committed = [novel([i]) for i in range(prompt)]
    first = truth(committed)
    drafter.observe(round_of((first,), 0, len(committed), cost(len(committed))))
    committed.append(first)
    seconds = 0.0
    start = len(committed)
    while len(committed) - start < num_tokens:
        lag = drafter._model.lag(committed) if drafter._model else 0
        draft = drafter.propose(committed, 16)
        taken: list[int] = []
        for token in [*draft.tokens, None]:
            taken.append(truth([*committed, *taken]))
            if taken[-1] != token:
                break
        drafting = 0.0
        if draft.source == "draft_model":
            reading = draft_cost * (1 + lag / 4) if lag else 0.0
            drafting = reading + draft_cost * (draft.num_drafted - (lag > 0))
            draft = replace(draft, read_seconds=reading)
        width = 1 + len(draft.tokens)
        finished = Round(
            draft, tuple(taken), len(taken) - 1, len(committed) - 1, width, drafting, cost(width)
        )
        seconds += drafting + cost(width)
        drafter.observe(finished)
        committed += taken
    return seconds / (cost(1) * (len(committed) - start))


def round_of(tokens: tuple[int, ...], accepted: int, width: int, seconds: float) -> Round:
    from homespec.decoding.types import NO_DRAFT

    return Round(NO_DRAFT, tokens, accepted, 0, width, 0.0, seconds)


def adaptive(
    agreement: float | None,
    truth: Callable[[Sequence[int]], int],
    size_ratio: float = 0.4,
    sure: float = 4.0,
) -> AdaptiveDrafter:
    model = None
    if agreement is not None:
        model = DraftModelDrafter(Imitator(truth, agreement, sure), FakeSampler(SURE))
    return AdaptiveDrafter(NgramDrafter(), model, Learned(Priors(size_ratio=size_ratio)))


def tuned(agreement: float, cost: Cost, draft_cost: float) -> AdaptiveDrafter:
    """With a profile of this box and pair."""

    class Curve:
        def seconds(self, num_tokens: int, context_length: int) -> float:
            return cost(num_tokens)

    model = DraftModelDrafter(Imitator(novel, agreement), FakeSampler(SURE))
    priors = Priors(
        cost=Curve(),
        draft_token_seconds=draft_cost,
        read_token_seconds=draft_cost / 5,
        model_rate=0.9,
    )
    return AdaptiveDrafter(NgramDrafter(), model, Learned(priors))


@pytest.mark.parametrize("cost", [flat, steep, stepped])
@pytest.mark.parametrize("truth", [novel, periodic])
@pytest.mark.parametrize("agreement", [None, 0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("draft_cost", [0.005, 0.03, 0.2])
@pytest.mark.parametrize("misjudged", [0.5, 1, 2])
def test_it_is_never_much_slower_than_plain(
    cost: Cost,
    truth: Callable[[Sequence[int]], int],
    agreement: float | None,
    draft_cost: float,
    misjudged: float,
) -> None:
    """Even where the draft costs twice, or half, of what its size lets expect."""
    drafter = adaptive(agreement, truth, draft_cost / 0.05 * misjudged)
    assert simulate(drafter, truth, cost, draft_cost=draft_cost) < 1.06


@pytest.mark.parametrize("cost", [steep, stepped])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9])
def test_a_draft_that_is_never_sure_is_let_alone(cost: Cost, agreement: float) -> None:
    """Its tokens are computed and not proposed: they are paid for all the same."""
    drafter = adaptive(agreement, novel, sure=0.5)
    assert simulate(drafter, novel, cost, draft_cost=0.02) < 1.06


def test_the_first_token_of_a_piece_need_not_pay_alone() -> None:
    drafter = tuned(0.88, stepped, 0.015)
    assert simulate(drafter, novel, stepped, draft_cost=0.015) < 0.85


def test_a_drafted_token_has_one_price_however_many_are_proposed() -> None:
    """The one that was computed and left out, and those read before, cost what they cost."""
    learned = Learned(Priors(draft_token_seconds=1.0))
    sources = {"source": "draft_model"}
    learned.observe_draft(Draft((), num_drafted=1, read_seconds=0.3, **sources), 2, 0.3)
    assert learned.draft_token(0) == 1.0  # nothing was seen of a single one
    learned.observe_draft(Draft((7,), num_drafted=2, **sources), 0, 0.04)
    assert learned.draft_token(0) == pytest.approx(0.02)
    assert learned.reading(3, 0) == pytest.approx(0.06)
    assert learned.proposed_token(0) > 0.02
    learned.observe_draft(Draft((7,), num_drafted=1, read_seconds=0.1, **sources), 99, 0.1)
    assert learned.reading(50, 0) == pytest.approx(0.05)


@pytest.mark.parametrize("num_tokens", [10, 25, 60])
def test_short_answers_do_not_pay_for_learning(num_tokens: int) -> None:
    """A long prompt is not read twice for an answer of a few tokens."""
    drafter = adaptive(0.0, novel)
    took = simulate(drafter, novel, steep, draft_cost=0.02, num_tokens=num_tokens, prompt=800)
    assert took < 1.10


def test_what_a_draft_lost_on_one_text_is_not_lost_on_the_next() -> None:
    """It was right before, and each of these texts would have it read a prompt again."""

    def small_cpu(n: int) -> float:
        return 0.054 * (1 + 0.3 * (n - 1))

    learned = tuned(0.4, small_cpu, 0.01).learned
    took = []
    for _ in range(8):
        model = DraftModelDrafter(Imitator(novel, 0.4), FakeSampler(SURE))
        drafter = AdaptiveDrafter(NgramDrafter(), model, learned)
        took.append(
            simulate(drafter, novel, small_cpu, draft_cost=0.01, num_tokens=128, prompt=150)
        )
    assert sum(took) / len(took) < 1.03
    assert max(took[1:]) < 1.06


def test_the_less_a_draft_gains_the_sooner_a_plain_pass_is_timed() -> None:
    """It gained by a price that was taken while the machine had other work."""
    asked = {}
    for gain in (1.02, 1.3, 3.0):
        cost = LearnedCost()
        cost.observe(1, 100, 0.05)
        passes = 0
        while not cost.wants_plain(gain):
            cost.observe(2, 100, 0.08)
            passes += 1
        asked[gain] = passes
    assert asked == pytest.approx({1.02: 4, 1.3: 60, 3.0: 192}, abs=1)


def test_a_good_cheap_draft_is_used_and_deep() -> None:
    assert simulate(adaptive(0.95, novel), novel, flat, draft_cost=0.003) < 0.4


def test_a_good_draft_on_a_steep_box_is_used_as_far_as_it_pays() -> None:
    """Here one drafted token gains at most 2 / (1.66 + 0.1) = 1.14; a profile tells so."""
    drafter = tuned(1.0, steep, 0.005)
    assert simulate(drafter, novel, steep, draft_cost=0.005) < 0.90


def test_a_text_that_repeats_is_looked_up() -> None:
    assert simulate(adaptive(None, periodic), periodic, flat) < 0.3
    assert simulate(adaptive(None, periodic), periodic, steep) < 0.85


def test_lookup_and_model_compete() -> None:
    """The better of the two is taken: a model that is dear loses to a text that repeats."""
    drafter = adaptive(0.9, periodic)
    assert simulate(drafter, periodic, flat, draft_cost=0.04) < 0.35
    assert drafter.learned.rounds["ngram"] > drafter.learned.rounds["draft_model"]
    drafter = adaptive(0.9, novel)
    simulate(drafter, novel, flat, draft_cost=0.004)
    assert drafter.learned.rounds["draft_model"] > 0.8 * sum(drafter.learned.rounds.values())


def test_off_is_tried_again_when_the_text_changes() -> None:
    """Lookups fail for long, then the text begins to repeat."""

    def truth(tokens: Sequence[int]) -> int:
        return novel(tokens) if len(tokens) < 300 else periodic(tokens)

    drafter = adaptive(None, truth)
    assert simulate(drafter, truth, flat, num_tokens=900) < 0.6


def test_the_loop_sees_why() -> None:
    drafter = adaptive(0.9, novel)
    assert drafter.explain() == ["Nothing was decoded beyond the first token."]
    simulate(drafter, novel, flat, draft_cost=0.004)
    text = "\n".join(drafter.explain())
    for words in ("draft_model", "target pass", "Lookups", "accepted"):
        assert words in text


def test_best_depth_is_the_maximum_of_tokens_over_seconds() -> None:
    rates = [0.9, 0.8, 0.7, 0.2, 0.2]

    def speed(depth: int) -> float:
        reach = np.cumprod([1, *rates[:depth]])
        return float(reach.sum()) / (steep(depth + 1) / 4 + 0.002 * depth)

    choice = best_depth(rates, lambda n: steep(n) / 4, lambda k: 0.002 * k)
    assert choice.rate == pytest.approx(max(speed(k) for k in range(6)))
    assert choice.depth == max(range(6), key=speed)
    assert best_depth([0.1], steep, lambda k: 0.01).depth == 0
    assert best_depth([], steep, lambda k: 0.01).depth == 0


def test_a_disturbed_pass_changes_little() -> None:
    cost = LearnedCost()
    for _ in range(5):
        cost.observe(1, 100, 0.05)
        cost.observe(4, 100, 0.15)
    cost.observe(4, 100, 5.0)
    assert cost.seconds(4, 200) == pytest.approx(0.15)
    assert cost.seconds(1, 200) == pytest.approx(0.05)
    assert 0.05 < cost.seconds(2, 200) < 0.15


def test_what_a_change_of_width_costs_is_charged_to_the_draft() -> None:
    cost = LearnedCost()
    for _ in range(3):
        cost.observe(1, 100, 0.001)
    for _ in range(9):
        cost.observe(3, 100, 0.004)
        cost.observe(1, 100, 0.003)
    assert cost.seconds(1, 100) == pytest.approx(0.001)
    assert cost.seconds(3, 100) == pytest.approx(0.006)
    for _ in range(9):
        cost.observe(3, 100, 0.002)  # the same width again is cheap
    assert cost.seconds(3, 100) == pytest.approx(0.002)


def test_the_price_of_a_plain_pass_is_asked_anew() -> None:
    """It was timed while the machine had other work; drafting looked good ever since."""
    cost = LearnedCost()
    for _ in range(9):
        cost.observe(1, 100, 0.09)
    asked = 0
    for _ in range(400):
        width = 1 if cost.wants_plain() else 2
        asked += width == 1
        cost.observe(width, 100, 0.03 * (1 + 0.9 * (width - 1)))
    assert cost.seconds(1, 100) == pytest.approx(0.03)
    assert 0 < asked <= 0.02 * 400


class Curve:
    def seconds(self, num_tokens: int, context_length: int) -> float:
        return 0.01 * num_tokens + 1e-5 * context_length


def test_neighbouring_widths_share_what_they_took() -> None:
    """Each width alone would go by one pass, and the third one was disturbed."""
    cost = LearnedCost(Curve())
    for width, slowdown in ((17, 1.2), (19, 1.2), (22, 3.0)):
        cost.observe(width, 0, slowdown * 0.01 * width)
    assert cost.seconds(22, 0) == pytest.approx(1.2 * 0.22)


def test_what_wide_passes_took_in_a_busy_hour_is_forgotten() -> None:
    cost = LearnedCost(Curve())
    for _ in range(5):
        cost.observe(8, 0, 3 * 0.08)
    for passed in range(70):
        assert (cost.seconds(8, 0) > 0.1) == (passed <= 64)
        cost.observe(1, 0, 0.01)


def test_a_curve_is_corrected_by_the_clock() -> None:
    cost = LearnedCost(Curve())
    assert cost.seconds(3, 1000) == pytest.approx(0.04)
    cost.observe(3, 1000, 0.08)
    assert cost.seconds(3, 2000) == pytest.approx(0.10)


def test_a_rate_starts_at_its_prior_and_follows_what_it_sees() -> None:
    rate = Rate(0.5)
    assert rate.value == 0.5
    for _ in range(100):
        rate.observe(True)
    assert rate.value > 0.9
    for _ in range(30):
        rate.observe(False)
    assert rate.value < 0.4


def test_what_many_texts_showed_is_believed_at_the_next_one() -> None:
    rate = Rate(0.8)
    for _ in range(20):
        for _ in range(8):
            rate.observe(False)
        rate.fade()
    assert rate.value < 0.2
    for _ in range(12):
        rate.observe(True)  # this text is another one
    assert rate.value > 0.5
