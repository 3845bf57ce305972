"""Sizes of memory as people write them: 512M, 1.5GiB."""

from __future__ import annotations

import re

import click

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def memory_size(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The bytes that are meant; the units are of 1024s, with or without iB or B."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", value.strip(), re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{value!r} is no size: write 512M or 1.5G.", param=parameter)
    return int(float(match[1]) * (1 << _UNITS[match[2].lower()]))


reserve_option = click.option(
    "--reserve",
    "reserve_bytes",
    callback=memory_size,
    metavar="SIZE",
    envvar="HOMESPEC_RESERVE",
    help="RAM left to the rest of the machine (default: the larger of 1G and 10 %).",
)
