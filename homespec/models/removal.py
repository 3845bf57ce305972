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

    A draft stays where the target of another pair that uses it is here.
    """
    pair = find_pair(name, catalog=catalog, offline=offline)
    if isinstance(pair.target.source, LocalFile):
        raise UsageError(
            f"{pair.target.source.path} was not downloaded by homespec, so it is not removed."
        )
    known = load_catalog(catalog).pairs.values()
    others = [other for other in known if other.name != pair.name]
    files, kept = [pair.target], []
    for draft in pair.drafts:
        user = next((other for other in others if _needs(other, draft)), None)
        if user:
            kept.append((draft, user.name))
        elif not isinstance(draft.source, LocalFile):
            files.append(draft)
    held = {file: sources.removable_bytes(file.source) for file in files}
    there = tuple(file for file in files if held[file] or sources.locate(file.source))
    freed = sum(held[file] for file in there)
    return pair, Removal(there, freed, tuple(kept), _ends_default(there))


def remove(removal: Removal) -> None:
    """Delete the files; a default that loses one of them is none any more."""
    for file in removal.files:
        sources.remove(file.source)
    if removal.ends_default:
        forget_default()


def _needs(pair: Pair, file: ModelFile) -> bool:
    """Whether a pair that is here uses this file."""
    used = [one.source for one in (pair.target, *pair.drafts)]
    return file.source in used and sources.locate(pair.target.source) is not None


def _ends_default(files: tuple[ModelFile, ...]) -> bool:
    default = None
    with contextlib.suppress(UsageError):
        default = load_default()
    if default is None:
        return False
    going = {sources.locate(file.source) for file in files} - {None}
    return any(sources.locate(file.source) in going for file in (default.target, *default.drafts))
