"""What one arm did with one prompt, and a whole run; both as plain JSON and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from homespec.errors import UsageError

FORMAT = "homespec bench 1"
PARTS = ("prompt", "draft", "verify", "sample", "other")
"""Where the time goes; each is `<part>_seconds` of a Run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text parts from the first arm's.

    position: tokens they share. gap: how far the target's logits of the two tokens are apart there;
    near 0 is a tie that rounding decides, None where the position could not be read again.
    """

    position: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. Durations in seconds, sizes in bytes.

    seconds: from outside, around everything. The parts are the engine's own clocks; other: what is
    neither prompt, drafting, a pass of the target nor sampling. began: since the run's start.
    depths: tokens drafted, by round. same: whether the text is the first arm's (None: nothing to
    compare, or sampling that may differ). others_cpu: share of the machine that other programs took
    meanwhile. reported: a server's own figures.
    """

    arm: int
    prompt: str
    category: str
    repeat: int
    began: float
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    first_token_seconds: float
    prompt_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    other_seconds: float = 0.0
    num_rounds: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    same: bool | None = None
    difference: Difference | None = None
    rss_bytes: int | None = None
    device_bytes: int | None = None
    others_cpu: float | None = None
    reported: dict[str, float] = field(default_factory=dict)

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return max(self.seconds - self.first_token_seconds, 0.0)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, per second."""
        if self.num_tokens < 2 or not self.decode_seconds:
            return None
        return (self.num_tokens - 1) / self.decode_seconds

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Tokens of the prompt per second; of a server's, by the client's clock."""
        seconds = self.prompt_seconds or self.first_token_seconds
        return self.num_prompt_tokens / seconds if seconds and self.num_prompt_tokens else None

    @property
    def seconds_per_token(self) -> float:
        """End to end: what is compared, so that a text cut short is no faster for it."""
        return self.seconds / self.num_tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at the process: memory, and the device's where there is one, at a time of the run."""

    at: float
    rss_bytes: int
    others_cpu: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole run. machine, settings, environment: plain values, told as they are."""

    arms: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]
    cold_start: dict[str, float]
    machine: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def arm_names(self) -> list[str]:
        """By the number that runs carry."""
        return [str(arm["name"]) for arm in self.arms]

    @property
    def categories(self) -> list[str]:
        """In the order they were asked."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def runs_of(self, arm: int, category: str | None = None) -> list[Run]:
        """An arm's runs, of all categories or one."""
        return [run for run in self.runs if run.arm == arm and category in (None, run.category)]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BenchResult:
        """From `as_dict`; what a summary added is left out. Raises UsageError for anything else."""
        hint = "Make one: homespec bench --json"
        if values.get("format") != FORMAT:
            raise UsageError("This is no result of this version of homespec bench.", hint=hint)
        try:
            return cls(
                arms=tuple(values["arms"]),
                runs=tuple(map(_run, values["runs"])),
                cold_start=dict(values["cold_start"]),
                machine=dict(values["machine"]),
                settings=dict(values["settings"]),
                environment=dict(values["environment"]),
                samples=tuple(Sample(**sample) for sample in values["samples"]),
                notes=tuple(values["notes"]),
                interrupted=bool(values["interrupted"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise UsageError("This result of homespec bench is broken.", hint=hint) from exc


def _run(values: dict[str, Any]) -> Run:
    difference = values["difference"]
    sequences = ("drafted_by_position", "accepted_by_position", "depths")
    return Run(
        **{
            **values,
            **{name: tuple(values[name]) for name in sequences},
            "difference": Difference(**difference) if difference else None,
        }
    )


def pairs(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Those of the same prompt and repeat."""
    known = {(run.prompt, run.repeat): run for run in others}
    return [
        (run, known[run.prompt, run.repeat]) for run in runs if (run.prompt, run.repeat) in known
    ]
