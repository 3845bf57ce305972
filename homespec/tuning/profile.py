"""What was measured for a pair on a box, kept in the state folder as readable JSON.

A profile holds for the machine, the library and the files it was made with; `load_profile` says
which of them changed.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from homespec import paths
from homespec.disk import whole_file
from homespec.models.files import verify
from homespec.models.references import shard_names
from homespec.tuning.box import Box, this_box
from homespec.tuning.cost import CostCurve
from homespec.tuning.placement import Placement

VERSION = 4
"""Of the format and of what is measured: raised when an older profile is of no use."""

SHIPPED = "as shipped"
"""Among the variants of a draft: its own file."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A model file as it was; for a model in parts: sizes summed, the latest time of change."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Switches:
    """Run-time switches of a model: fields of LoadParams.

    threads, threads_batch: for passes of one token, and of several. repack: the target's alone.
    """

    flash_attention: str
    cache_type_k: str
    cache_type_v: str
    threads: int
    threads_batch: int
    repack: bool = True


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

    largest: the largest difference of a logit. slowdown: what passes cost, as ratio to the
    fastest settings.
    """

    invariant: bool
    largest: float
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class VariantResult:
    """A draft that was tried.

    quantization: SHIPPED for the draft itself. cost: as the target's, with a row for the last
    token alone. greedy, sampled: agreement with the target, None where no agreement could have
    made up for the cost. speedup: predicted ratio to plain decoding at
    its best depth above 0.
    """

    quantization: str
    size_bytes: int
    switches: Switches
    cost: CostCurve
    greedy: float | None
    sampled: float | None
    depth: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What this box is good at with this pair.

    placement: where the models lay. draft: the file as shipped; fitted: the copy to load instead,
    if one pays. draft_switches,
    draft_cost: of the one to load. strict_promise: of strictly exact settings, None where the
    switches above keep the promise themselves, or it could not be tried. strict_by_default:
    those settings cost less than 5 % here, so they are taken unasked. draft_pays: whether the
    draft model is predicted to be faster than plain decoding on some kind of text.
    """

    box: Box
    target: FileIdentity
    draft: FileIdentity | None
    placement: Placement
    created: str  # date and time, UTC
    seconds: dict[str, float]  # how long each stage took
    target_switches: Switches
    target_cost: CostCurve
    default_promise: WidthPromise
    tiled: bool = True  # whether llama.cpp's tiled kernels are not the slower ones
    strict_promise: WidthPromise | None = None
    strict_cost: CostCurve | None = None
    strict_by_default: bool = False
    draft_switches: Switches | None = None
    draft_cost: CostCurve | None = None
    fitted: FittedDraft | None = None
    draft_pays: bool = False
    acceptance: Acceptance = Acceptance(None, None)
    variants: tuple[VariantResult, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader should know: left out, disturbed

    @property
    def draft_path(self) -> Path | None:
        """The fitted draft, where it is chosen and still there."""
        path = Path(self.fitted.path) if self.fitted else None
        return path if path and path.exists() else None

    @property
    def lacks_copy(self) -> bool:
        """Whether the fitted draft is chosen, but no longer there."""
        return self.fitted is not None and self.draft_path is None

    def as_shipped(self) -> Profile:
        """What it says of the draft's own file in the place of the copy."""
        for one in self.variants:
            if one.quantization == SHIPPED:
                accepted = Acceptance(one.greedy, one.sampled, self.acceptance.ngram)
                return dataclasses.replace(
                    self,
                    draft_switches=one.switches,
                    draft_cost=one.cost,
                    fitted=None,
                    acceptance=accepted,
                )
        return self.of_target_alone()

    def of_target_alone(self) -> Profile:
        """What it says of the target, which holds without a draft too."""
        return dataclasses.replace(
            self,
            draft=None,
            draft_switches=None,
            draft_cost=None,
            fitted=None,
            draft_pays=False,
            acceptance=Acceptance(None, None, self.acceptance.ngram),
            variants=(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"version": VERSION, **plain(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The profile from `as_dict`. Raises ValueError, KeyError or TypeError where it is none."""
        if values.get("version") != VERSION:
            raise ValueError(f"version {values.get('version')} instead of {VERSION}")
        profile: Profile = typed(cls, {k: v for k, v in values.items() if k != "version"})
        return profile


def plain(value: Any) -> Any:
    """Dataclasses to dictionaries, tuples to lists."""
    if isinstance(value, CostCurve):
        return value.as_dict()
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def typed(kind: Any, value: Any) -> Any:
    """The inverse of `plain`, by the annotations; anything else than they say is an error."""
    if kind is CostCurve:
        return CostCurve.from_dict(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = value.keys() - hints.keys()
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        return cast("Any", kind)(**{key: typed(hints[key], item) for key, item in value.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(typed(inner[0], item) for item in value)
    if origin is dict:
        return {str(key): typed(inner[1], item) for key, item in value.items()}
    if inner:  # X | None
        return None if value is None else typed(inner[0], value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{value!r} where {kind.__name__} is expected")
    return kind(value)


def identify(path: Path, *, sha256: str | None = None) -> FileIdentity:
    """What a model file, or all parts of a split one, can be recognised by."""
    stats = [path.with_name(name).stat() for name in shard_names(path.name)]
    size, changed = sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)
    return FileIdentity(path.name, size, changed, sha256)


def _is_same(path: Path, known: FileIdentity) -> bool:
    """Whether it is that file; one of another date or name has to have its digest."""
    try:
        found = identify(path)
        if (found.name, found.size_bytes, found.mtime_ns) == (
            known.name,
            known.size_bytes,
            known.mtime_ns,
        ):
            return True
        same_size = found.size_bytes == known.size_bytes
        return same_size and known.sha256 is not None and verify(path, known.sha256)
    except OSError:
        return False


def profile_path(target: Path, draft: Path | None, box: Box) -> Path:
    """Where the profile of a pair on a box is kept.

    A home folder may be shared by several machines: each has a folder of its own. The library
    is not in the name, so that a profile of another one is found, and told of.
    """
    names = [path.stem for path in (target, draft) if path]
    readable = re.sub(r"[^\w.-]+", "_", "+".join(names))[:120]
    digest = hashlib.sha256("/".join(names).encode()).hexdigest()[:8]
    return _folder() / box.machine / f"{readable}-{digest}.json"


def _folder() -> Path:
    return paths.state_dir() / "profiles"


def load_profile(
    target: Path, draft: Path | None = None, box: Box | None = None
) -> tuple[Profile | None, str]:
    """(profile, "") for a pair on this box, or (None, why there is none that holds)."""
    box = box or this_box()
    path = profile_path(target, draft, box)
    try:
        profile = Profile.from_dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        elsewhere = list(path.parent.parent.glob(f"*/{glob.escape(path.name)}"))
        return None, "it was tuned on another machine" if elsewhere else "it was never tuned here"
    except OSError as exc:
        return None, f"its profile cannot be read: {exc.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        return None, f"its profile is of another version or damaged ({exc})"
    return (None, reason) if (reason := _changed(profile, target, draft, box)) else (profile, "")


def load_target_profile(target: Path, box: Box | None = None) -> Profile | None:
    """What was measured of a target here, alone or with whatever draft; the latest, or None."""
    box = box or this_box()
    found = []
    for path in (_folder() / box.machine).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            profile = Profile.from_dict(json.loads(path.read_text("utf-8")))
            if profile.target.name == target.name and not _changed(
                profile.of_target_alone(), target, None, box
            ):
                found.append(profile)
    latest = max(found, key=lambda profile: profile.created, default=None)
    return latest.of_target_alone() if latest else None


def _changed(profile: Profile, target: Path, draft: Path | None, box: Box) -> str:
    """What is no longer as it was tuned; "" where all is."""
    if profile.box.library != box.library:
        return f"it was tuned with llama-cpp-python {profile.box.library}, not {box.library}"
    if profile.box.build != box.build:
        return "llama.cpp was built anew since it was tuned"
    if profile.box != box:
        return "the machine has changed"
    pairs = ((target, profile.target, "target"), (draft, profile.draft, "draft"))
    for path, known, what in pairs:
        if (path is None) != (known is None) or (path and known and not _is_same(path, known)):
            return f"the {what}'s file has changed"
    return ""


def save_profile(profile: Profile, target: Path, draft: Path | None = None) -> Path:
    """Keep a profile; returns where. Raises DiskError."""
    path = profile_path(target, draft, profile.box)
    write_json(path, profile.as_dict())
    return path


def copies_in_use() -> set[Path]:
    """The copies of drafts that profiles name, those of other pairs and machines among them."""
    found = set()
    for path in _folder().glob("*/*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads(path.read_text("utf-8"))
            if values["version"] == VERSION:
                found.add(Path(values["fitted"]["path"]))
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all. Raises DiskError."""
    with whole_file(path) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
