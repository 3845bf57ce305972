"""Has the engine answer a prompt as an arm says, with empty caches and the arm's own experience."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

from homespec.bench.arms import Arm
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import GenerationStats, clock
from homespec.decoding.types import Round
from homespec.engine import Engine
from homespec.llama.devices import devices


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out: tokens, clocks, the depth of each round, and the seconds from outside."""

    tokens: tuple[int, ...]
    seconds: float
    stats: GenerationStats
    depths: tuple[int, ...]

    def figures(self) -> dict[str, Any]:
        """Fields of a Run."""
        stats = self.stats
        # What the clocks inside cannot see, such as building the samplers, is other work too.
        around = max(self.seconds - stats.total_seconds, 0.0)
        return {
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_tokens": len(self.tokens),
            "seconds": self.seconds,
            "first_token_seconds": stats.time_to_first_token_seconds,
            "prompt_seconds": stats.prompt_seconds,
            "draft_seconds": stats.draft_seconds,
            "verify_seconds": stats.verify_seconds,
            "sample_seconds": stats.sample_seconds,
            "other_seconds": stats.other_seconds + around,
            "num_rounds": stats.num_rounds,
            "drafted_by_position": tuple(stats.drafted_by_position),
            "accepted_by_position": tuple(stats.accepted_by_position),
            "depths": self.depths,
        }


class EngineArm:
    """An arm on a loaded engine. Each has its own experience of what drafting brings."""

    def __init__(self, engine: Engine, arm: Arm) -> None:
        self.arm = arm
        self._engine = engine
        self._learned = copy.deepcopy(engine.learned)

    def answer(
        self, prompt: list[int], sampling: SamplingParams, max_tokens: int, *, warm: bool = False
    ) -> Answer:
        """Answer with exactly `max_tokens` tokens: the model is not let end before.

        warm: leave the target's cache as it is, with the prompt in it.
        """
        engine = self._engine
        engine.learned = self._learned
        if not warm:
            engine.context.clear()
        if engine.draft_context is not None:
            engine.draft_context.clear()
        depths: list[int] = []

        def observe(finished: Round) -> None:
            depths.append(len(finished.draft.tokens))
            if self.arm.sleep:
                busy = finished.draft_seconds + finished.verify_seconds + finished.sample_seconds
                time.sleep(self.arm.sleep * busy)

        began = clock()
        result = engine.stream(
            prompt,
            sampling=sampling,
            observe=observe,
            max_tokens=max_tokens,
            ignore_eos=True,
            **self.arm.options,
        ).result
        seconds = clock() - began
        # The first round, which ends the prompt, never drafts.
        return Answer(result.tokens, seconds, result.stats, tuple(depths[1:]))


def device_bytes() -> int | None:
    """What is in use on all devices that layers can be placed on; None where there are none."""
    used = [device.total_bytes - device.free_bytes for device in devices() if device.offloads]
    return sum(used) if used else None
