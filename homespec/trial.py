"""Does this draft pay on this machine? A few answers with and without it, and what they took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import GenerationStats, clock
from homespec.engine import Engine
from homespec.errors import ModelError

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Summarize in one sentence: The council met on Tuesday to discuss the bridge. Repairs will "
    "begin in May and last until autumn, and during that time a ferry will run every half hour.",
    "Why does ice float on water? Explain it to a child.",
    "Write these lines again, with every mention of Monday changed to Friday:\n"
    "The library opens at nine on Monday.\nThe market is closed on Monday.\nMonday is a holiday.",
)
"""Code, a summary, an explanation and an edit: drafts are accepted more often in some."""

MAX_TOKENS = 48
MIN_ACCEPTANCE_RATE = 0.05
_BUDGET_SECONDS = 90.0  # after which no further prompt is asked
_ANSWER_SECONDS = 20.0  # after which an answer is cut
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out. Rates in tokens per second, of the tokens after each answer's first.

    num_same: answers that were the same both times; another one parted at a near-tie.
    tokens_per_second, num_drafted: at the depths the engine chose; it drafts nothing where that is
    not worth its time. acceptance_rate, mean_acceptance_length: of a draft model always drafting
    the usual three tokens, so that they tell of the draft and not of the choice.
    """

    drafting: str
    num_prompts: int
    num_same: int
    num_drafted: int
    plain_tokens_per_second: float
    tokens_per_second: float
    acceptance_rate: float
    mean_acceptance_length: float

    @property
    def speed_ratio(self) -> float:
        """Speculative over plain; 0 where there was nothing to measure."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else 0.0

    @property
    def objection(self) -> str | None:
        """Why this drafting should not be used, as a clause; None where it pays."""
        if self.acceptance_rate < MIN_ACCEPTANCE_RATE:
            return f"{self.acceptance_rate:.0%} of what it drafts is accepted"
        if not self.num_drafted:
            return "its tokens cost more here than they save"
        if self.speed_ratio < 1:
            return f"decoding is slower with it, {self.speed_ratio:.2f} x plain"
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "speed_ratio": self.speed_ratio, "objection": self.objection}


def run_trial(engine: Engine, *, progress: Callable[[int, int], None] | None = None) -> Trial:
    """Answer the prompts plain and with the engine's draft (or n-grams), by turns.

    Where there is a draft it is judged a second time, at a fixed depth, for its acceptance.

    progress: called before each prompt with its number, from 1, and how many there are. A machine
    that is slow at it is asked fewer of them.
    """
    drafting = "draft_model" if engine.draft_context else "ngram"
    plain = _Arm(engine, spec_type="none")
    chosen = _Arm(engine, spec_type=drafting)
    fixed = _Arm(engine, spec_type=drafting, depth="fixed") if engine.draft_context else chosen
    for arm in (plain, fixed):
        arm.warm_up()
    same, asked, began = 0, 0, clock()
    for number, prompt in enumerate(PROMPTS, 1):
        if clock() - began > _BUDGET_SECONDS:
            break
        if progress:
            progress(number, len(PROMPTS))
        # By turns, so that neither always meets the warmer machine.
        arms = (plain, chosen) if number % 2 else (chosen, plain)
        one, other = [arm.answer(prompt) for arm in arms]
        if fixed is not chosen:
            fixed.answer(prompt)
        shorter = min(len(one), len(other))  # one may have been cut
        asked, same = asked + 1, same + (one[:shorter] == other[:shorter])
    return Trial(
        drafting,
        asked,
        same,
        chosen.num_drafted,
        plain.tokens_per_second,
        chosen.tokens_per_second,
        fixed.acceptance_rate,
        fixed.mean_acceptance_length,
    )


class _Arm:
    """One way of decoding and the sums of what it did."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self._engine, self._options = engine, options
        self._stats: list[GenerationStats] = []

    def warm_up(self) -> None:
        """Read the weights from the disk, which is nobody's speed."""
        self._generate("Hello", max_tokens=4)

    def answer(self, prompt: str) -> tuple[int, ...]:
        """The tokens of an answer."""
        tokens, stats = self._generate(prompt, max_tokens=MAX_TOKENS)
        self._stats.append(stats)
        return tokens

    def _generate(self, prompt: str, max_tokens: int) -> tuple[tuple[int, ...], GenerationStats]:
        options = {**self._options, "max_tokens": max_tokens}
        try:
            generation = self._engine.stream(prompt, sampling=_GREEDY, **options)
        except ModelError:  # no chat template
            generation = self._engine.stream(prompt, sampling=_GREEDY, raw=True, **options)
        began = clock()
        for _ in generation:
            if clock() - began > _ANSWER_SECONDS:
                break
        generation.cancel()
        return generation.result.tokens, generation.result.stats

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(stats.decode_seconds for stats in self._stats)
        return self._num_decoded / seconds if seconds else 0.0

    @property
    def num_drafted(self) -> int:
        return sum(stats.num_drafted for stats in self._stats)

    @property
    def acceptance_rate(self) -> float:
        accepted = sum(stats.num_accepted for stats in self._stats)
        return accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        rounds = sum(stats.num_rounds for stats in self._stats)
        return self._num_decoded / rounds if rounds else 0.0

    @property
    def _num_decoded(self) -> int:
        """Tokens after the first of each answer, which is prompt work."""
        return sum(max(0, stats.num_tokens - 1) for stats in self._stats)
