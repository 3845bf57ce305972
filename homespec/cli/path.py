"""`homespec path`: where a model lies."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from homespec.cli.catalog_options import catalog_option
from homespec.errors import HomespecError
from homespec.models.pairs import local_path


@click.command("path")
@click.argument("name", metavar="[NAME|SOURCE|USER/REPO[:QUANT]]", required=False)
@click.option("--draft", is_flag=True, help="The draft's path instead of the target's.")
@catalog_option
def command(name: str | None, draft: bool, catalog: Path | None) -> None:
    """Print the path of a downloaded target: that of the default pair where none is named.

    Exit code 1 where it is not downloaded. Asks no network.
    """
    path = local_path(name, draft=draft, catalog=catalog)
    if path is None:
        raise HomespecError(
            f"{name or 'The default pair'} is not downloaded.",
            hint=f"homespec pull {shlex.quote(name or 'starter')}",
        )
    click.echo(path)
