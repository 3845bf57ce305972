"""What commands do before they load a model: the pair that is meant, and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from homespec.console import load_bars
from homespec.fetching import fetch_planned, params_for
from homespec.generation import WITHOUT_DRAFT_MODEL
from homespec.loading import LoadParams
from homespec.models.catalog import Pair
from homespec.models.pairs import find_pair


def named_pair(models: dict[str, Any], spec_type: str = "auto") -> Pair:
    """The pair of `options.model_references`, without a draft where none is to be used."""
    pair = find_pair(**models)
    return replace(pair, drafts=()) if spec_type in WITHOUT_DRAFT_MODEL else pair


def fetch_named(
    models: dict[str, Any], settings: dict[str, Any], spec_type: str = "auto"
) -> tuple[Path, Path | None, LoadParams]:
    """Target, draft, and how to load them; bars while they are fetched.

    settings: fields of LoadParams, as `options.load_params` gives them.
    """
    pair = named_pair(models, spec_type)
    params = params_for(pair, settings)
    with load_bars() as bars:
        files = fetch_planned(
            pair,
            params,
            needs_draft=models.get("draft") is not None,
            progress=bars.download,
            offline=models["offline"],
        )
    return *files, params
