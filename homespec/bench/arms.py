"""The ways of decoding that are compared: `plain`, `auto`, `depth=fixed:4,spec-type=ngram`.

Keys are the flags of `homespec generate` that say how to draft, without their dashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from homespec.errors import UsageError
from homespec.generation import GenerateParams

NAMED = {"plain": "spec-type=none", "auto": "spec-type=auto"}
"""Arms with a name of their own."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding.

    options: fields of GenerateParams. sleep: the share of a round's time that is slept after it,
    for trying whether the bench finds it. url: of a server that answers instead of the engine.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    sleep: float = 0.0
    url: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return self.options.get("spec_type") == "none" and not self.sleep and self.url is None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"name": self.name, "options": self.options, "sleep": self.sleep, "url": self.url}


def parse_arms(texts: Sequence[str], url: str | None = None) -> list[Arm]:
    """The arms that are meant, each with a name of its own; the first is what others are judged by.

    None asked for: plain and auto. One: it is set beside these two. Two or more stand alone. url:
    a server that is one more arm.
    """
    if len(texts) < 2:
        texts = [*NAMED, *(text for text in texts if text.strip() not in NAMED)]
    arms = [parse_arm(text) for text in texts]
    if url is not None:
        arms.append(Arm(f"server at {url}", url=url))
    seen: Counter[str] = Counter()
    named = []
    for arm in arms:
        seen[arm.name] += 1
        name = arm.name if seen[arm.name] == 1 else f"{arm.name} ({seen[arm.name]})"
        named.append(Arm(name, arm.options, arm.sleep, arm.url))
    return named


def parse_arm(text: str) -> Arm:
    """One arm from what a user writes. Raises UsageError for unknown keys and values."""
    name = ",".join(part.strip() for part in text.split(",") if part.strip())
    if not name:
        raise UsageError("An arm is empty.", hint=_HINT)
    options: dict[str, Any] = {}
    for part in name.split(","):
        for setting in NAMED.get(part, part).split(","):
            key, found, value = setting.partition("=")
            if not found or key.strip() not in KEYS:
                raise UsageError(f"{setting!r} is no setting of an arm.", hint=_HINT)
            options |= _read(key.strip(), value.strip())
    sleep = options.pop("sleep", 0.0)
    GenerateParams(**options)  # raises for what it cannot mean
    return Arm(name, options, sleep)


def _read(key: str, value: str) -> dict[str, Any]:
    try:
        return KEYS[key](value)
    except ValueError as exc:
        raise UsageError(f"{value!r} is no value of an arm's {key}.", hint=_HINT) from exc


def _text(field_name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {field_name: value}


def _integer(field_name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {field_name: int(value)}


def _share(field_name: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        if not 0 <= share <= 1:
            raise ValueError(value)
        return {field_name: share}

    return read


def _depth(value: str) -> dict[str, Any]:
    """`adaptive`, `fixed`, or either with a number of tokens: fixed:4."""
    policy, found, number = value.partition(":")
    return {"depth": policy, "draft_depth": int(number)} if found else {"depth": policy}


KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "spec-type": _text("spec_type"),
    "depth": _depth,
    **dict.fromkeys(("spec-draft-n-max", "draft-max", "draft-n", "draft"), _integer("draft_depth")),
    **dict.fromkeys(("spec-draft-n-min", "draft-min"), _integer("min_draft")),
    **dict.fromkeys(("spec-draft-p-min", "draft-p-min"), _share("p_min")),
    "spec-draft-sampling": _text("draft_sampling"),
    "spec-rule": _text("rule"),
    "sleep": _share("sleep"),
}
"""Key -> what its value says; `sleep=10%` is no flag, it is for checking the bench itself."""

_HINT = (
    'An arm is plain, auto, or settings such as "depth=fixed:4" or "spec-type=ngram,draft-max=8"; '
    f"keys: {', '.join(KEYS)}."
)
