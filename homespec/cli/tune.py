"""`homespec tune`: measure what a pair does best on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from homespec.cli import options
from homespec.cli.files import fetch_named, named_pair
from homespec.cli.measuring import measuring
from homespec.cli.profile_table import print_profile
from homespec.errors import UsageError
from homespec.tune import profile_of, tune_pair
from homespec.tuning.plot import check_plot, draw
from homespec.tuning.tune import TuneParams


@click.command("tune")
@click.argument("pair", required=False, metavar="[PAIR]")
@options.model_options
@click.option("--show", is_flag=True, help="Print what was measured before; measure nothing.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw the cost of passes and the expected speed (needs matplotlib).",
)
@click.option(
    "--budget",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help="Time to spend (default: 20 to 120 by the target's speed). All is measured at least once.",
)
@click.option("--thorough", is_flag=True, help="Try drafts too whose making takes minutes.")
@click.option("--fresh", is_flag=True, help="Do not go on from an interrupted run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(pair: str | None, **flags: Any) -> None:
    """Measure what this machine is good at with PAIR, and keep it for every later start.

    PAIR is a pair of the catalogue, a GGUF file, a source or user/repo[:QUANT]; -m and -md name
    target and draft apart. An interrupted run goes on where it was.
    """
    named = options.model_references(flags)
    if pair is not None:
        if named["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        named["target"] = pair
    plot: Path | None = flags["plot"]
    if plot is not None:
        check_plot(plot)
    if flags["show"]:
        profile = profile_of(named_pair(named))
    else:
        target, draft, load = fetch_named(named, {})
        params = TuneParams(
            budget_seconds=flags["budget"], thorough=flags["thorough"], fresh=flags["fresh"]
        )
        with measuring() as tell:
            profile = tune_pair(target, draft, params, tell, load=load)
    if flags["as_json"]:
        options.print_json(profile.as_dict())
    else:
        print_profile(profile)
    if plot is not None:
        draw(profile, plot)
