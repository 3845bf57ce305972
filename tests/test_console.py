"""What people see: words that come from models, files and users are shown as they are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from homespec import console
from homespec.bench.compare import Comparison
from homespec.cli import bench_tables, models, setup
from homespec.console import load_bars, plain_console, print_diagnosis
from homespec.doctor import Diagnosis
from homespec.models.catalog import ModelFile, Pair
from homespec.models.references import LocalFile
from homespec.shelf import Entry, Fit

ODD = "odd [/b] :dog: [red]name"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """stderr is a terminal, and this is what it gets."""
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "stderr", lambda: plain_console(file=screen, force_terminal=True, width=200)
    )
    monkeypatch.setattr(setup, "stderr", console.stderr)
    return screen


def test_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    file = ModelFile(ODD, LocalFile(Path("x.gguf")), licence="own [/i]")
    pair = Pair(f"pair {ODD}", file, (file,))
    models._print([Entry(pair, Fit("refused", "too [/large]"), True, "no", False)])
    shown = capsys.readouterr().out
    assert shown.count(ODD) == 3
    assert "own [/i]" in shown
    assert "no: too [/large]" in shown


def test_the_findings_of_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "D0", "description": "[/b]", "kind": "gpu", "free_bytes": 1, "total_bytes": 2}
    library = {"cpu": ODD, "threads": 2, "devices": [device], "own_kernels": True}
    print_diagnosis(Diagnosis({"python": "3 [/b]"}, {"library": library}), {})
    shown = capsys.readouterr().out
    assert ODD in shown
    assert "D0 ([/b])" in shown
    assert "homespec's, for several tokens at once" in shown


def test_names_of_arms(capsys: pytest.CaptureFixture[str]) -> None:
    bench_tables.print_comparison(Comparison((), {ODD: ("[/a]", "b")}, (), ()))
    assert ODD in capsys.readouterr().out
    table = bench_tables._table("arm", f"decode / {ODD}")
    plain_console().print(table)
    assert ODD in capsys.readouterr().out


def test_bars_and_spinners(terminal: io.StringIO) -> None:
    with load_bars() as bars:
        bars.download(ODD, 1, 2)
        bars._progress.refresh()
    assert ODD in terminal.getvalue()
    terminal.truncate(0)
    with setup._Guide(asks=False, shows_plan=False) as guide:
        guide.working(f"Reading {ODD}")
    assert ODD in terminal.getvalue()
