"""How answers are made and shown, and the names by which a user changes that."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from homespec.decoding.sampling import SamplingParams
from homespec.errors import UsageError
from homespec.generation import MAX_DRAFT_DEPTH, GenerateParams


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling, budget and speculation of each answer, and what is shown of it.

    think: handed to the template as `enable_thinking`, None leaves that to the template.
    fold: show of the reasoning only that there was some. stats: a line of figures after an answer.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    generate: GenerateParams = field(default_factory=GenerateParams)
    think: bool | None = None
    fold: bool = False
    stats: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """The settings in a file. Raises UsageError for keys and values that cannot be meant."""
        parts: dict[str, Any] = dict(values)
        try:
            for name, kind in (("sampling", SamplingParams), ("generate", GenerateParams)):
                if name in parts:
                    parts[name] = kind(**_tuples(parts[name]))
            return cls(**parts)
        except TypeError as exc:
            raise UsageError(f"The settings cannot be read: {exc}.") from exc


def _tuples(values: Any) -> dict[str, Any]:
    """JSON's lists as the tuples they were."""
    if not isinstance(values, dict):
        raise TypeError(f"{values!r} is no group of settings")
    as_tuple = {
        "stop": tuple,
        "logit_bias": lambda pairs: tuple((int(token), float(bias)) for token, bias in pairs),
    }
    return {
        name: as_tuple[name](value) if name in as_tuple else value for name, value in values.items()
    }


ALIASES = {
    "temp": "temperature",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "typical": "typical_p",
}
FIXED = {
    "num_ctx": "-c",
    "num_gpu": "-ngl",
    "num_thread": "-t",
    "num_batch": "-tb",
}
"""Ollama's names for what is decided when the model is loaded, and the flag that decides it."""

_SAMPLING = {
    name: type(getattr(SamplingParams(), name))
    for name in SamplingParams.__dataclass_fields__
    if name not in ("seed", "logit_bias", "grammar")
}
PARAMETERS = (*_SAMPLING, "seed", "max_tokens", "stop")
"""What `/set parameter` takes; Ollama's names are understood, too."""


def set_parameter(settings: Settings, name: str, text: str) -> Settings:
    """The settings with one parameter changed. Raises UsageError, which says what is allowed."""
    name = ALIASES.get(name.lower(), name.lower())
    if name in FIXED:
        raise UsageError(
            f"{name} is decided when the model is loaded.",
            hint=f"Leave, and start the chat with {FIXED[name]}.",
        )
    if name not in PARAMETERS:
        near = difflib.get_close_matches(name, PARAMETERS, 1)
        raise UsageError(
            f"{name!r} is no parameter.",
            hint=f"Did you mean {near[0]}?" if near else f"Known: {', '.join(PARAMETERS)}.",
        )
    if name == "stop":
        try:
            stops = tuple(shlex.split(text))
        except ValueError:
            stops = (text,)  # a lone quote is a stop string like any other
        return replace(settings, generate=replace(settings.generate, stop=stops))
    value = _number(name, text)
    if name == "max_tokens":
        budget = None if value < 0 else int(value)
        return replace(settings, generate=replace(settings.generate, max_tokens=budget))
    if name == "seed" and value < 0:
        value = None
    return replace(settings, sampling=replace(settings.sampling, **{name: value}))


def _number(name: str, text: str) -> Any:
    kind = _SAMPLING.get(name, int)
    try:
        return kind(text)
    except ValueError as exc:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} is {what}, not {text!r}.") from exc


def parameters(settings: Settings) -> list[tuple[str, str]]:
    """All parameters with their values, as `/show parameters` has them."""
    sampling, generate = settings.sampling, settings.generate
    rows = [(name, f"{getattr(sampling, name):g}") for name in _SAMPLING]
    rows.append(("seed", "drawn anew" if sampling.seed is None else str(sampling.seed)))
    rows.append(("max_tokens", str(generate.max_tokens or "until the model ends")))
    rows.append(("stop", " ".join(shlex.quote(stop) for stop in generate.stop) or "none"))
    return rows


def set_draft(settings: Settings, text: str) -> Settings:
    """The settings with another draft depth: `auto`, `off`, or a number of tokens."""
    generate = settings.generate
    if text == "auto":
        generate = replace(generate, spec_type=None, depth="adaptive", draft_depth=None)
    elif text in ("off", "0"):
        generate = replace(generate, spec_type="none")
    elif text.isascii() and text.isdigit() and int(text) <= MAX_DRAFT_DEPTH:
        spec_type = None if generate.spec_type == "none" else generate.spec_type
        generate = replace(generate, spec_type=spec_type, depth="fixed", draft_depth=int(text))
    else:
        raise UsageError(
            f"{text!r} is no draft depth.", hint=f"Give auto, off, or 1 to {MAX_DRAFT_DEPTH}."
        )
    return replace(settings, generate=generate)


def draft_words(settings: Settings) -> str:
    """The draft setting, as `/draft` takes it."""
    generate = settings.generate
    if generate.spec_type == "none":
        return "off"
    return "auto" if generate.depth == "adaptive" else str(generate.draft_depth or "fixed")
