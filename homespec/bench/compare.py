"""Two results beside each other: two boxes, two settings, two versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from homespec.bench.records import BenchResult
from homespec.bench.statistics import CONFIDENCE, Ratio
from homespec.bench.summary import Figures, decoding, figures_of, ratio_of
from homespec.errors import UsageError


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """An arm that both results have. ratio: how many times as fast B decodes."""

    arm: str
    a: Figures
    b: Figures
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two results have in common, and where they differ: name -> (A's, B's)."""

    arms: tuple[ArmComparison, ...]
    differences: dict[str, tuple[Any, Any]]
    verdicts: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **asdict(self),
            "arms": [
                {
                    "arm": one.arm,
                    "a": one.a.as_dict(),
                    "b": one.b.as_dict(),
                    "ratio": one.ratio.as_dict() if one.ratio else None,
                }
                for one in self.arms
            ],
        }


def read_result(file: Path) -> BenchResult:
    """A result that `homespec bench --json` printed. Raises UsageError."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except OSError as exc:
        raise UsageError(f"{file} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise UsageError(f"{file} is no JSON.", hint="Make one: homespec bench --json") from exc
    if not isinstance(values, dict):
        raise UsageError(f"{file} is no result of homespec bench.")
    return BenchResult.from_dict(values)


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """B against A, arm by arm of the same name. Raises UsageError without a common arm."""
    common = [name for name in a.arm_names if name in b.arm_names]
    if not common:
        raise UsageError("These results have no arm in common.")
    arms = []
    for name in common:
        i, j = a.arm_names.index(name), b.arm_names.index(name)
        ratio = ratio_of(a.runs_of(i), b.runs_of(j), decoding)
        arms.append(ArmComparison(name, figures_of(a, i), figures_of(b, j), ratio))
    return Comparison(
        tuple(arms),
        dict(_differences("", _facts(a), _facts(b))),
        tuple(map(_verdict, arms)),
        tuple(_warnings(a, b)),
    )


def _verdict(one: ArmComparison) -> str:
    ratio = one.ratio
    if ratio is None:
        return f"{one.arm}: no prompt is common to both."
    interval = f"{ratio.low:.3f} to {ratio.high:.3f} x at {CONFIDENCE:.0%}, {ratio.count} prompts"
    if ratio.verdict == "no difference":
        return (
            f"{one.arm}: no difference that these runs can show, {ratio.median:.3f} x ({interval})."
        )
    return f"{one.arm}: B is {ratio.verdict} than A, {ratio.median:.3f} x ({interval})."


def _warnings(a: BenchResult, b: BenchResult) -> Iterator[str]:
    for name, result in (("A", a), ("B", b)):
        for sentence in result.environment.get("disturbances", []):
            yield f"{name} was disturbed. {sentence}"
    for role in a.machine["files"].keys() & b.machine["files"].keys():
        if a.machine["files"][role]["sha256"] != b.machine["files"][role]["sha256"]:
            yield f"The {role} is not the same file."
    if a.settings["max_tokens"] != b.settings["max_tokens"]:
        yield "Answers are not of the same length; seconds per token are compared."


def _facts(result: BenchResult) -> dict[str, Any]:
    return {"machine": result.machine, "settings": result.settings}


def _differences(name: str, a: Any, b: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(f"{name}.{key}" if name else key, a.get(key), b.get(key))
    elif a != b and not (isinstance(a, list | tuple) and list(a) == list(b or [])):
        yield name, (a, b)
