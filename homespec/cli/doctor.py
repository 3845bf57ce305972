"""`homespec doctor`: look at this machine, its build and its devices, and try a decode."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import click

from homespec.cli import options
from homespec.cli.catalog_options import catalog_options
from homespec.console import load_bars, print_diagnosis, print_error
from homespec.doctor import diagnose
from homespec.engine import STRICT_EXACT
from homespec.errors import LibraryError
from homespec.models.pairs import fetch_pair, find_pair


@click.command("doctor")
@click.option("-m", "--model", metavar="MODEL", help="Try this model (default: generate's).")
@catalog_options
@click.option("-t", "--threads", type=click.IntRange(0), default=0)
@options.cache_options
@click.option("--strict-exact", is_flag=True, help="Try the settings of --strict-exact.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, threads: int, as_json: bool, **flags: Any) -> None:
    """Look at this machine, its build and its devices, and try a decode in a child process."""
    offline = flags["offline"]
    pair = find_pair(model, catalog=flags["catalog"], offline=offline)
    with load_bars() as bars:
        path, _ = fetch_pair(replace(pair, drafts=()), progress=bars.download, offline=offline)
    settings: dict[str, Any] = {
        "threads": threads,
        "flash_attention": flags["flash_attn"],
        "cache_type_k": flags["cache_type_k"],
        "cache_type_v": flags["cache_type_v"],
    }
    if flags["strict_exact"]:
        settings |= {**STRICT_EXACT, "exact_kernels": True}
    diagnosis = diagnose(path, settings)
    if as_json:
        options.print_json(asdict(diagnosis))
    else:
        print_diagnosis(diagnosis, settings)
    if diagnosis.problem:
        if not as_json:
            print_error(diagnosis.problem, diagnosis.cure)
        click.get_current_context().exit(LibraryError.exit_code)
