"""What of a downloaded pair can go, and its going."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from homespec.errors import UsageError
from homespec.models import sources
from homespec.models.catalog import ModelFile, Pair, load_catalog
from homespec.models.default_pair import forget_default, load_default
from homespec.models.pairs import Name, find_pair
from homespec.models.references import LocalFile


@dataclass(frozen=True, slots=True)
class Removal:
    """What `remove` is about to delete, and what it leaves because another pair needs it.

    kept: files of the pair, each with the pair that uses it.
    """

    files: tuple[ModelFile, ...]
    freed_bytes: int
    kept: tuple[tuple[ModelFile, str], ...]
    ends_default: bool


def plan_removal(
    name: Name, *, catalog: Name | None = None, offline: bool = False
) -> tuple[Pair, Removal]:
    """The pair that is meant, and what of it can go; raises UsageError for files of the user's.

    A file stays where another pair uses it whose own target is here and does not go.
    """
    pair = find_pair(name, catalog=catalog, offline=offline)
    if isinstance(pair.target.source, LocalFile):
        raise UsageError(
            f"{pair.target.source.path} was not downloaded by homespec, so it is not removed."
        )
    default = _default()
    others = [*([default] if default else []), *load_catalog(catalog).pairs.values()]
    others = [other for other in others if not _same(other.target, pair.target)]
    fetched = [f for f in (pair.target, *pair.drafts) if not isinstance(f.source, LocalFile)]
    held = {file: sources.removable_bytes(file.source) for file in fetched}
    there = [file for file in fetched if held[file] or sources.locate(file.source)]
    users = {file: next((o.name for o in others if _needs(o, file)), None) for file in there}
    files = tuple(file for file in there if users[file] is None)
    kept = tuple((file, user) for file, user in users.items() if user is not None)
    freed = sum(held[file] for file in files)
    return pair, Removal(files, freed, kept, _ends_default(files, default))


def remove(removal: Removal) -> None:
    """Delete the files; a default that loses one of them is none any more."""
    for file in removal.files:
        sources.remove(file.source)
    if removal.ends_default:
        forget_default()


def _needs(pair: Pair, file: ModelFile) -> bool:
    """Whether a pair that is here uses this file."""
    used = any(_same(one, file) for one in (pair.target, *pair.drafts))
    return used and sources.locate(pair.target.source) is not None


def _same(one: ModelFile, other: ModelFile) -> bool:
    return str(one.source) == str(other.source)  # whether pinned or not


def _default() -> Pair | None:
    with contextlib.suppress(UsageError):  # one that cannot be read is none
        return load_default()
    return None


def _ends_default(files: tuple[ModelFile, ...], default: Pair | None) -> bool:
    if default is None:
        return False
    going = {sources.locate(file.source) for file in files} - {None}
    return any(sources.locate(file.source) in going for file in (default.target, *default.drafts))
