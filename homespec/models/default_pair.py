"""The pair that is meant where none is named, as `homespec setup` stored it.

It is kept with its sources and digests, so that it needs neither its catalogue nor the hub.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from homespec import paths
from homespec.disk import disk_error, whole_file
from homespec.errors import UsageError
from homespec.models.catalog import ModelFile, Pair
from homespec.models.references import LocalFile, parse_source

_VERSION = 1


def default_path() -> Path:
    """Where it is kept."""
    return paths.state_dir() / "default.json"


def load_default() -> Pair | None:
    """The stored pair, None where there is none; UsageError for a file that cannot be read."""
    path = default_path()
    try:
        stored = json.loads(path.read_text("utf-8"))
        return _pair(**stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, UsageError) as exc:
        raise UsageError(
            f"The stored default pair {path} cannot be read.",
            hint="`homespec setup` stores another, or name a model with -m.",
        ) from exc


def store_default(pair: Pair) -> None:
    """Make this pair, with its preferred draft and its context, the default."""
    path = default_path()
    value = {
        "version": _VERSION,
        "name": pair.name,
        "target": _as_dict(pair.target),
        "drafts": [_as_dict(pair.draft)] if pair.draft else [],
        "n_ctx": pair.n_ctx,
    }
    with whole_file(path) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def forget_default() -> None:
    """From now on the starter is the default."""
    try:
        default_path().unlink(missing_ok=True)
    except OSError as exc:
        raise disk_error(exc, default_path()) from exc


def _pair(
    *,
    version: int,
    name: str,
    target: dict[str, Any],
    drafts: list[Any],
    n_ctx: int | None = None,
) -> Pair:
    if version != _VERSION or (n_ctx is not None and (type(n_ctx) is not int or n_ctx < 0)):
        raise ValueError("of another version")
    files = tuple(_file(**draft) for draft in drafts)
    return Pair(name, _file(**target), files, n_ctx=n_ctx)


def _file(*, name: str, source: str, size_bytes: int | None, sha256: str | None) -> ModelFile:
    return ModelFile(name, parse_source(source, size_bytes=size_bytes, sha256=sha256))


def _as_dict(file: ModelFile) -> dict[str, Any]:
    source = file.source
    if isinstance(source, LocalFile):  # meant from any folder
        source = replace(source, path=source.path.absolute())
    return {
        "name": file.name,
        "source": str(source),
        "size_bytes": source.size_bytes,
        "sha256": source.sha256,
    }
