"""Flags of all commands that name models. Apart from `options.py`, which needs llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

catalog_option = click.option(
    "--catalog",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="HOMESPEC_CATALOG",
    help="More pairs, in the form of models.yaml.",
)
_offline_option = click.option(
    "--offline",
    is_flag=True,
    envvar="HOMESPEC_OFFLINE",
    help="Use what is on this machine; download nothing.",
)


def catalog_options(command: F) -> F:
    """--catalog and --offline."""
    return catalog_option(_offline_option(command))
