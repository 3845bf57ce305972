"""`homespec pull`: bring a pair to this machine."""

from __future__ import annotations

from pathlib import Path

import click

from homespec.cli.catalog_options import catalog_options
from homespec.console import load_bars, print_note
from homespec.models import sources
from homespec.models.catalog import ModelFile
from homespec.models.files import human
from homespec.models.pairs import fetch_pair, find_pair, missing_parts


@click.command("pull")
@click.argument("name", metavar="NAME|SOURCE|USER/REPO[:QUANT]")
@catalog_options
def command(name: str, catalog: Path | None, offline: bool) -> None:
    """Download a pair of the catalogue, both files, or a single model.

    What is here already is verified and not fetched again. After an interruption the same command
    goes on where it stopped.
    """
    pair = find_pair(name, catalog=catalog, offline=offline)
    files = [file for file in (pair.target, pair.draft) if file]
    if missing_parts(pair):
        print_note(f"Fetching {' and '.join(_with_size(file) for file in files)}.")
    with load_bars() as bars:
        paths = fetch_pair(pair, progress=bars.download, offline=offline)
    for path in filter(None, paths):
        click.echo(path)


def _with_size(file: ModelFile) -> str:
    size = sources.size(file.source)
    return f"{file.source.name} ({human(size)})" if size else file.source.name
