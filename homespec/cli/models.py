"""`homespec models`: the catalogue, as this machine sees it."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from homespec.cli import options
from homespec.cli.catalog_options import catalog_option
from homespec.console import plain_console, printable
from homespec.models.files import human
from homespec.shelf import Entry, list_pairs

_FITS = {
    "fits": ("yes", "green"),
    "reduced": ("without its draft", "yellow"),
    "refused": ("no", "red"),
}
_DOWNLOADED = {"yes": "yes", "target": "target", "partly": "partly", "no": ""}
_WIDE = 200  # into a pipe: a line a pair, for grep


@click.command("models")
@catalog_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def command(catalog: Path | None, as_json: bool) -> None:
    """List the pairs of the catalogue: what fits this machine, what is downloaded."""
    entries = list_pairs(catalog)
    if as_json:
        options.print_json([entry.as_dict() for entry in entries])
    else:
        _print(entries)


def _print(entries: list[Entry]) -> None:
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=_WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "target", "draft", "size", "licence", "fits", "here", "seen"):
        table.add_column(
            column,
            overflow="fold",
            no_wrap=column in ("name", "size", "seen"),
            justify="right" if column == "size" else "left",
        )
    for entry in entries:
        table.add_row(*_row(entry))
    console.print(table)
    console.print(
        "\nhere: downloaded. seen: somebody has run target and draft together. Pairs that are not "
        "here are judged by the size of their files; `homespec check NAME` reads their headers.",
        style="dim",
        soft_wrap=not console.is_terminal,
    )


def _row(entry: Entry) -> tuple[Text | str, ...]:
    pair = entry.pair
    fits, style = _FITS[entry.fit.verdict]
    if entry.fit.verdict == "refused":
        fits = f"{fits}: {printable(entry.fit.reason)}"
    elif not entry.suits:
        fits = f"{fits}, but is meant for a {'/'.join(pair.hardware).upper()}"
    name = Text(printable(pair.name), "bold")
    if entry.is_default:
        name += Text(" (default)", "cyan")
    return (
        name,
        printable(pair.target.name.removeprefix(f"{pair.name}-")),
        printable(pair.draft.name) if pair.draft else "n-grams",
        human(entry.size_bytes) if entry.size_bytes else "?",
        printable(pair.target.licence or "?"),
        Text(fits, style),
        _DOWNLOADED[entry.downloaded],
        "yes" if pair.seen else "no",
    )
