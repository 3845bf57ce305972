"""`homespec check`: does a pair work together, and does it fit this machine?"""

from __future__ import annotations

from typing import Any

import click

from homespec.checking import check_pair
from homespec.cli import options
from homespec.cli.catalog_options import catalog_options
from homespec.cli.sizes import reserve_option
from homespec.cli.tables import print_report
from homespec.console import load_bars
from homespec.fetching import params_for, plan_request
from homespec.models.catalog import load_catalog
from homespec.models.pairs import find_pair

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

    Both are files, names of the catalogue, sources or user/repo[:QUANT]; without them it is the
    default pair. Only headers are read, on the hub by ranges: the answer comes before any download.
    Exit code 0: usable, 3: not.
    """
    catalog, offline = flags["catalog"], flags["offline"]
    pair = find_pair(target, draft, catalog=catalog, offline=offline)
    settings = options.load_params(flags) | {"reserve_bytes": flags["reserve_bytes"]}
    request, known = plan_request(params_for(pair, settings)), load_catalog(catalog)
    with load_bars() as bars:
        report = check_pair(pair, request, known, offline=offline, progress=bars.download)
    if flags["as_json"]:
        options.print_json(report.as_dict())
    else:
        print_report(report)
    click.get_current_context().exit(0 if report.usable else REFUSED)
