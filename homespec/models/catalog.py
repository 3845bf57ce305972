"""The catalogue: pairs of target and drafts by name. The only door to yaml.

    files:
      NAME: {source, size_bytes, sha256, licence, context_length, notes}
    pairs:
      NAME: {target, drafts, min_memory_gb, hardware, seen, evidence, notes}

Target and drafts are names of files, or sources themselves.

The catalogue that ships with homespec comes first, then the user's own, then the file given with
`--catalog`; a later entry replaces an earlier one of the same name, and may use its files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

import homespec
from homespec import paths
from homespec.errors import UsageError
from homespec.models.references import LocalFile, Source, parse_source

_T = TypeVar("_T")
_HARDWARE = ("cpu", "gpu")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C takes a tenth of the time


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model file, or the first one of a split model."""

    name: str
    source: Source
    licence: str | None = None
    context_length: int | None = None
    notes: str = ""

    @property
    def size_bytes(self) -> int | None:
        return self.source.size_bytes

    @property
    def sha256(self) -> str | None:
        return self.source.sha256


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with its drafts, the preferred one first; without drafts n-grams are used.

    n_ctx: the context in tokens that it was set up with, None where it was not.
    """

    name: str
    target: ModelFile
    drafts: tuple[ModelFile, ...] = ()
    min_memory_gb: int | None = None
    hardware: tuple[str, ...] = _HARDWARE
    seen: bool = False
    evidence: str = ""
    notes: str = ""
    n_ctx: int | None = None

    @property
    def draft(self) -> ModelFile | None:
        """The preferred draft."""
        return self.drafts[0] if self.drafts else None

    @property
    def tier(self) -> str:
        """The class of machine it is meant for, by memory."""
        return f"{self.min_memory_gb} GB" if self.min_memory_gb else "unknown"

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the target and its preferred draft, where both are known."""
        sizes = [file.size_bytes for file in (self.target, self.draft) if file]
        return None if None in sizes else sum(size for size in sizes if size)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All known pairs and files by name, in the order they are listed."""

    pairs: Mapping[str, Pair]
    files: Mapping[str, ModelFile]

    def get(self, name: str) -> Pair:
        """The pair of this name; raises UsageError with the nearest names."""
        if name in self.pairs:
            return self.pairs[name]
        raise UsageError(
            f"The catalogue holds no pair {name}.",
            hint=_did_you_mean(name, self.pairs) or "homespec models lists them.",
        )


def load_catalog(extra: str | os.PathLike[str] | None = None) -> Catalog:
    """The shipped catalogue, the user's own, and the file `extra`, joined."""
    catalog = _read(_shipped_path(), Catalog({}, {}))
    own = paths.config_dir() / "models.yaml"
    if own.is_file():
        catalog = _read(own, catalog)
    if extra is not None:
        catalog = _read(Path(extra), catalog)
    return catalog


def _shipped_path() -> Path:
    """models.yaml inside the installed package, or at the top of the source tree."""
    package = Path(homespec.__file__).parent
    packaged = package / "models.yaml"
    return packaged if packaged.is_file() else package.parent / "models.yaml"


def _read(path: Path, known: Catalog) -> Catalog:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_LOADER)
    except OSError as exc:
        raise UsageError(f"The catalogue {path} cannot be read: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"The catalogue {path} is not UTF-8 text.") from exc
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise UsageError(f"{path}, line {line}: {exc.problem}.") from exc
    except (yaml.YAMLError, RecursionError) as exc:
        raise UsageError(f"The catalogue {path} is not readable YAML.") from exc
    if root is None:
        return known
    return _parse_catalog(_Field(path, "", root), known)


def _parse_catalog(root: _Field, known: Catalog) -> Catalog:
    sections = root.mapping("files", "pairs")
    files, pairs = dict(known.files), dict(known.pairs)
    for name, field in _entries(sections, "files"):
        files[name] = _parse_file(name, field)
    for name, field in _entries(sections, "pairs"):
        pairs[name] = _parse_pair(name, field, files)
    return Catalog(pairs, files)


def _entries(sections: dict[str, _Field], section: str) -> list[tuple[str, _Field]]:
    return list(sections[section].mapping().items()) if section in sections else []


def _parse_file(name: str, field: _Field) -> ModelFile:
    keys = ("source", "size_bytes", "sha256", "licence", "context_length", "notes")
    fields = field.mapping(*keys, required=("source",))
    size = _optional(fields, "size_bytes", _Field.positive)
    sha256 = _optional(fields, "sha256", _Field.digest)
    source = _parse_source(fields["source"], size_bytes=size, sha256=sha256)
    return ModelFile(
        name,
        source,
        licence=_optional(fields, "licence", _Field.string),
        context_length=_optional(fields, "context_length", _Field.positive),
        notes=_optional(fields, "notes", _Field.string) or "",
    )


def _parse_pair(name: str, field: _Field, files: Mapping[str, ModelFile]) -> Pair:
    keys = ("target", "drafts", "min_memory_gb", "hardware", "seen", "evidence", "notes")
    fields = field.mapping(*keys, required=("target",))

    def file(reference: _Field) -> ModelFile:
        key = reference.string()
        if key in files:
            return files[key]
        if ":" in key:  # a source instead of a name: short for users who know their file
            source = _parse_source(reference)
            return ModelFile(source.name, source)
        raise reference.error(f"no file is named {key}", hint=_did_you_mean(key, files))

    hardware = _optional(fields, "hardware", _Field.items)
    for item in hardware or ():
        if item.string() not in _HARDWARE:
            raise item.error(f"{item.string()} is neither {' nor '.join(_HARDWARE)}")
    return Pair(
        name,
        file(fields["target"]),
        tuple(file(item) for item in _optional(fields, "drafts", _Field.items) or ()),
        min_memory_gb=_optional(fields, "min_memory_gb", _Field.positive),
        hardware=tuple(item.string() for item in hardware) if hardware else _HARDWARE,
        seen=_optional(fields, "seen", _Field.boolean) or False,
        evidence=_optional(fields, "evidence", _Field.string) or "",
        notes=_optional(fields, "notes", _Field.string) or "",
    )


def _parse_source(
    field: _Field, *, size_bytes: int | None = None, sha256: str | None = None
) -> Source:
    try:
        source = parse_source(field.string(), size_bytes=size_bytes, sha256=sha256)
    except UsageError as exc:
        raise field.error(exc.message, hint=exc.hint) from exc
    if isinstance(source, LocalFile):  # meant from where the catalogue lies
        source = replace(source, path=field.path.parent / source.path)
    return source


def _optional(fields: dict[str, _Field], key: str, read: Callable[[_Field], _T]) -> _T | None:
    return read(fields[key]) if key in fields else None


def _did_you_mean(name: str, known: Mapping[str, object]) -> str | None:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else None


@dataclass(frozen=True, slots=True)
class _Field:
    """A YAML node that knows its file, line and dotted name, for errors that point at it."""

    path: Path
    name: str
    node: Any

    def error(self, problem: str, *, hint: str | None = None) -> UsageError:
        where = f"{self.path}, line {self.node.start_mark.line + 1}"
        field = f", {self.name}" if self.name else ""
        return UsageError(f"{where}{field}: {problem.removesuffix('.')}.", hint=hint)

    def mapping(self, *allowed: str, required: tuple[str, ...] = ()) -> dict[str, _Field]:
        """The fields below, by name; with `allowed`, other names are errors."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error("must hold names and values")
        fields: dict[str, _Field] = {}
        for key_node, value in self.node.value:
            key = _Field(self.path, self.name, key_node).string()
            field = _Field(self.path, f"{self.name}.{key}" if self.name else key, value)
            at_key = _Field(self.path, field.name, key_node)
            if allowed and key not in allowed:
                hint = _did_you_mean(key, dict.fromkeys(allowed))
                raise at_key.error("unknown field", hint=hint or f"Known: {', '.join(allowed)}.")
            if key in fields:
                raise at_key.error("stands here twice")
            fields[key] = field
        for key in required:
            if key not in fields:
                raise self.error(f"{key} is missing")
        return fields

    def items(self) -> list[_Field]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("must be a list")
        return [_Field(self.path, f"{self.name}[{i}]", n) for i, n in enumerate(self.node.value)]

    def string(self) -> str:
        return self._scalar("str", "must be a text")

    def digest(self) -> str:
        text = self.string()
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
            raise self.error("must be 64 hexadecimal digits")
        return text

    def positive(self) -> int:
        text = self._scalar("int", "must be a whole number").replace("_", "")
        if not text.isdecimal() or int(text) == 0:
            raise self.error("must be a positive whole number")
        return int(text)

    def boolean(self) -> bool:
        return self._scalar("bool", "must be yes or no").lower() in ("yes", "true", "on")

    def _scalar(self, tag: str, problem: str) -> str:
        if (
            not isinstance(self.node, yaml.ScalarNode)
            or self.node.tag != f"tag:yaml.org,2002:{tag}"
        ):
            raise self.error(problem)
        return str(self.node.value)
