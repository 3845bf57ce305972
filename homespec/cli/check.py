"""`homespec check`: does a pair work together, and does it fit this machine?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from homespec.checking import check
from homespec.cli import options
from homespec.cli.catalog_options import catalog_options
from homespec.cli.sizes import reserve_option
from homespec.cli.tables import print_report
from homespec.console import load_bars
from homespec.engine import STRICT_EXACT, LoadParams
from homespec.planning import request_for

REFUSED = 3


@click.command("check")
@click.argument("target", required=False)
@click.argument("draft", required=False)
@catalog_options
@options.load_options
@reserve_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(target: str | None, draft: str | None, **flags: Any) -> None:
    """Compare the tokenizers of TARGET and DRAFT, and plan their memory on this machine.

    Both are files, names of the catalogue, sources or user/repo[:QUANT]. Only headers are read,
    on the hub by ranges, so the answer comes before any download. Exit code 0: usable, 3: not.
    """
    where = {"catalog": flags.pop("catalog"), "offline": flags.pop("offline")}
    reserve_bytes, as_json = flags.pop("reserve_bytes"), flags.pop("as_json")
    params = LoadParams(**options.load_params(flags))
    if params.strict_exact:
        params = replace(params, **STRICT_EXACT)
    request = request_for(params, reserve_bytes=reserve_bytes)
    with load_bars() as bars:
        report = check(target, draft, request, progress=bars.download, **where)
    if as_json:
        options.print_json(report.as_dict())
    else:
        print_report(report)
    click.get_current_context().exit(0 if report.usable else REFUSED)
