"""`homespec worker`: lend this machine to a cluster."""

from __future__ import annotations

from typing import Any

import click

from homespec.cli import options
from homespec.cli.batch import load_engine, parallel_option
from homespec.cli.sizes import reserve_option
from homespec.cluster.worker import serve
from homespec.console import print_note
from homespec.errors import UsageError


@click.command("worker")
@click.argument("address", metavar="tcp://HOST:8786")
@click.argument("pair", required=False, metavar="[PAIR]")
@parallel_option
@options.model_options
@options.load_options
@reserve_option
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
def command(address: str, pair: str | None, **flags: Any) -> None:
    """Answer rows of `homespec batch --cluster` with PAIR, for the Dask scheduler at ADDRESS.

    The model is loaded once, as far as the memory of this machine allows. Ctrl-C ends the worker;
    its rows are done elsewhere.
    """
    quiet = flags.pop("quiet")
    models = options.model_references(flags)
    if pair is not None:
        if models["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        models["target"] = pair
    models.pop("draft")
    load = options.load_params(flags)
    load["reserve_bytes"] = flags.pop("reserve_bytes")
    with load_engine(models, load, flags["parallel"]) as engine:

        def ready(own: str) -> None:
            if not quiet:
                print_note(
                    f"Worker {own} has {engine.model.path.stem}, {engine.parallel} rows at once."
                )

        serve(address, engine, ready)
        if not quiet:
            print_note("The scheduler ended, or let this worker go.")
