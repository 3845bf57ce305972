"""`homespec remove`: delete a downloaded pair."""

from __future__ import annotations

from pathlib import Path

import click

from homespec.cli.asking import confirmed
from homespec.cli.catalog_options import catalog_options
from homespec.console import print_note
from homespec.models.files import human
from homespec.models.removal import plan_removal, remove
from homespec.tuning.fitted import drop_copies_of

DECLINED = 1


@click.command("remove")
@click.argument("name", metavar="NAME|SOURCE|USER/REPO[:QUANT]")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@catalog_options
def command(name: str, yes: bool, catalog: Path | None, offline: bool) -> None:
    """Delete the downloaded files of a pair, an unfinished download included.

    Copies of a draft that tuning made go with it. What another downloaded pair uses stays,
    and so does what huggingface_hub shares between repositories (hf cache prune frees that).
    Files of your own are never deleted.
    """
    pair, removal = plan_removal(name, catalog=catalog, offline=offline)
    for file, user in removal.kept:
        print_note(f"{file.name} stays: {user} uses it.")
    if not removal.files:
        if not removal.kept:
            print_note(f"Nothing of {pair.name} is downloaded.")
        return
    names = " and ".join(file.source.name for file in removal.files)
    freed = human(removal.freed_bytes)
    if not yes and not confirmed(f"Delete {names} ({freed})?", default=False):
        print_note("Nothing was deleted.")
        click.get_current_context().exit(DECLINED)
    remove(removal)
    for file in removal.files:
        drop_copies_of(file.source.name)
    print_note(f"Deleted {names}: {freed} freed.")
    if removal.ends_default:
        print_note("It was the default; `homespec setup` chooses another.")
