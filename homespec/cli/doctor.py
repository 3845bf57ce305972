"""`homespec doctor`: look at this machine, its build and its devices, and try a decode."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from homespec.cli import options
from homespec.console import load_bars, print_diagnosis, print_error
from homespec.doctor import diagnose
from homespec.engine import STRICT_EXACT, resolve
from homespec.errors import LibraryError


@click.command("doctor")
@click.option("-m", "--model", metavar="MODEL", help="Try this model (default: the starter).")
@click.option("-t", "--threads", type=click.IntRange(0), default=0)
@options.cache_options
@click.option("--strict-exact", is_flag=True, help="Try the settings of --strict-exact.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, threads: int, as_json: bool, **flags: Any) -> None:
    """Look at this machine, its build and its devices, and try a decode in a child process."""
    with load_bars() as bars:
        path, _ = resolve(model, bars.download)
    settings: dict[str, Any] = {
        "threads": threads,
        "flash_attention": flags["flash_attn"],
        "cache_type_k": flags["cache_type_k"],
        "cache_type_v": flags["cache_type_v"],
    }
    if flags["strict_exact"]:
        settings |= {**STRICT_EXACT, "exact_kernels": True}
    diagnosis = diagnose(Path(path), settings)
    if as_json:
        options.print_json(asdict(diagnosis))
    else:
        print_diagnosis(diagnosis, settings)
    if diagnosis.problem:
        if not as_json:
            print_error(diagnosis.problem, diagnosis.cure)
        click.get_current_context().exit(LibraryError.exit_code)
