"""The HTML report: one page that needs nothing else, with plots drawn by matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from homespec.bench.records import PARTS, BenchResult
from homespec.bench.summary import ALL, summarize, verdicts
from homespec.disk import NAMED_HINT, whole_file
from homespec.errors import UsageError
from homespec.models.files import human


def check_report(file: Path) -> None:
    """Raise now what would fail after minutes: no folder to write to, no matplotlib."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise UsageError(f"{file} cannot be written.", hint="Name a file in a folder of yours.")
    _plots()


def write_report(result: BenchResult, file: Path) -> None:
    """Write the page; whole or not at all. Raises CannotRunError without matplotlib."""
    page = render(result)
    with whole_file(file, hint=NAMED_HINT) as part:
        part.write_text(page, "utf-8")


def render(result: BenchResult) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("homespec.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"rows": _rows, "size": human}
    figures = summarize(result)
    return environment.get_template("report.html").render(
        result=result,
        verdicts=verdicts(result),
        overall=[one for one in figures if one.category == ALL],
        by_category={
            name: [one for one in figures if one.category == name] for name in result.categories
        },
        parts=PARTS,
        plots=_plots()(result, figures),
    )


def _plots() -> Any:
    from homespec.bench.plots import plots  # noqa: PLC0415 - needs an extra

    return plots


def _rows(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as lines of a table."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, dict):
            rows += _rows(value, f"{name} · ")
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(map(str, value)) or "none"))
        elif isinstance(value, float):
            rows.append((name, f"{value:.4g}"))
        else:
            rows.append((name, "–" if value is None else str(value)))
    return rows
