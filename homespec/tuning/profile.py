"""What was measured for a pair on a box, kept in the state folder as readable JSON.

A profile holds for the machine, the library and the files it was made with; `load_profile` says
which of them changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homespec import paths
from homespec.llama.devices import cpu_features, cpu_name, devices, num_threads
from homespec.llama.library import version
from homespec.models.files import disk_error, verify
from homespec.models.references import shard_names
from homespec.tuning.cost import CostCurve

VERSION = 1
"""Of the format and of what is measured: raised when an older profile is of no use."""


@dataclass(frozen=True, slots=True)
class Box:
    """The machine and the library that a profile holds for."""

    cpu: str
    cpu_features: tuple[str, ...]  # as the system names them
    cores: int  # physical ones this process may use
    devices: tuple[str, ...]  # descriptions of those that layers can be placed on
    library: str  # llama-cpp-python's version


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A model file as it was; for a model in parts: sizes summed, the latest time of change."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Switches:
    """Run-time switches of a model: fields of LoadParams. threads: for one token, and for many."""

    flash_attention: str
    cache_type_k: str
    cache_type_v: str
    threads: int
    threads_batch: int


@dataclass(frozen=True, slots=True)
class FittedDraft:
    """A requantized copy of the draft that is faster here."""

    path: str
    quantization: str
    sha256: str
    parent_sha256: str


@dataclass(frozen=True, slots=True)
class MatchRate:
    """How often the token that followed a match of `length` tokens came again; count: of tries."""

    length: int
    rate: float
    count: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chance that a drafted token is accepted, given that those before it were: priors.

    greedy, sampled: the draft model at temperature 0, and at 0.8 with rejection sampling; None
    without a draft. ngram: by length of the match.
    """

    greedy: float | None
    sampled: float | None
    ngram: tuple[MatchRate, ...] = ()


@dataclass(frozen=True, slots=True)
class WidthPromise:
    """Whether logits are the same bits however many tokens a pass holds.

    largest: the largest difference of a logit. slowdown: cost of passes against the chosen
    switches with everything at its fastest, 1 where it is those.
    """

    invariant: bool
    largest: float
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class VariantResult:
    """A draft that was tried. speedup: predicted ratio to plain decoding at its best depth."""

    quantization: str  # "as shipped" for the draft itself
    size_bytes: int
    switches: Switches
    token_seconds: float  # of one token at the prediction's context length
    greedy: float
    sampled: float
    depth: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What this box is good at with this pair.

    draft: the file as shipped; fitted: the copy to load instead, if one pays. strict_by_default:
    width-invariant settings cost less than 5 % here, so they are taken unasked. draft_pays:
    whether the draft model is predicted to be faster than plain decoding at all.
    """

    box: Box
    target: FileIdentity
    draft: FileIdentity | None
    created: str  # date and time, UTC
    seconds: dict[str, float]  # how long each stage took
    target_switches: Switches
    target_cost: CostCurve
    default_promise: WidthPromise
    strict_promise: WidthPromise | None = None
    strict_cost: CostCurve | None = None
    strict_by_default: bool = False
    draft_switches: Switches | None = None
    draft_cost: CostCurve | None = None
    fitted: FittedDraft | None = None
    draft_pays: bool = False
    acceptance: Acceptance = Acceptance(None, None)
    variants: tuple[VariantResult, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"version": VERSION, **_plain(self)}
