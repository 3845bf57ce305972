"""Questions to the user."""

from __future__ import annotations

import sys

import click

from homespec.errors import UsageError


def confirmed(question: str, *, default: bool) -> bool:
    """The answer to a yes-or-no question on stderr.

    Raises UsageError where nobody can answer, click.Abort for Ctrl-C.
    """
    try:
        return click.confirm(question, default=default, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError(
            "There is a question, and nobody to answer it.", hint="--yes agrees beforehand."
        ) from None
