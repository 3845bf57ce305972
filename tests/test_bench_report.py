"""The HTML report, in a real browser: nothing missing, nothing too wide, light and dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homespec.bench import report
from homespec.bench.records import BenchResult, Sample
from homespec.bench.report import check_report, render, write_report
from homespec.errors import DiskError, UsageError

from tests.bench_models import tiny_bench_engine, tiny_run

PLOTS = ["speed", "ratio", "acceptance", "time", "depth", "memory", "others"]


@pytest.fixture(scope="module")
def result(tiny: Path, tiny_draft: Path) -> BenchResult:
    with tiny_bench_engine(tiny, tiny_draft) as engine:
        short = tiny_run(engine, "plain", "auto", "spec-type=draft_model,depth=fixed:4")
    # Runs of users last longer: a minute's looks at the machine.
    samples = (Sample(i / 10, (90 + i % 7) << 20, 0.1 * (i % 5 == 0)) for i in range(600))
    return replace(short, samples=tuple(samples))


@pytest.fixture(scope="module")
def page_file(result: BenchResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_report(result, file)
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system's: `scripts/test` installs it where it can."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("no Chromium is installed (Debian's package: chromium)")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("light", 400), ("dark", 400)])
def test_the_report_opens_in_a_browser(
    browser: Any, page_file: Path, scheme: str, width: int
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
    )
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(request.url))
    page.goto(page_file.as_uri())
    assert said == []
    # No part of the page is wider than the window: only tables scroll, in themselves.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in PLOTS:
        drawn = page.locator(f"#plot-{name} svg")
        assert drawn.count() == 1, name
        drawn.scroll_into_view_if_needed()
        box = drawn.bounding_box()
        assert 250 <= box["width"] <= width
        assert box["height"] >= 150
        assert is_drawn(page, name), name
    assert page.evaluate(SMALLEST_TEXT) >= 8  # pixels
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5
    context.close()


SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("figure svg")].flatMap(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return [...svg.querySelectorAll("text")].map(
        text => scale * parseFloat(getComputedStyle(text).fontSize));
}))"""

LOWEST_CONTRAST = """(() => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => parts(colour).slice(0, 3).map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
    ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor;
            if (parts(colour)[3] !== 0) return colour;
        }
    };
    const texts = [...document.querySelectorAll("h1, h2, h3, p, th, td, svg text")];
    return Math.min(...texts.map(text => {
        const style = getComputedStyle(text);
        const colour = text instanceof SVGElement ? style.fill : style.color;
        const [a, b] = [light(colour), light(behind(text))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }));
})()"""


def is_drawn(page: Any, name: str) -> bool:
    """Whether a plot shows a coloured mark and not its frame alone: its pixels are looked at."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.asarray(
        Image.open(io.BytesIO(page.locator(f"#plot-{name} svg").screenshot())).convert("HSV")
    )
    return int((pixels[..., 1] > 90).sum()) > 60


def test_the_page_needs_nothing_else(page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    outside = re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)[^)]*\)|<script|@import', text)
    assert outside == []
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href="#|url\(#)([^")]*)', text)) <= set(ids)


def test_the_page_tells_machine_files_versions_and_settings(
    result: BenchResult, page_file: Path
) -> None:
    text = page_file.read_text("utf-8")
    for value in (
        result.machine["cpu"],
        result.machine["files"]["target"]["sha256"],
        result.machine["files"]["draft"]["sha256"],
        result.machine["versions"]["llama-cpp-python"],
        "load average before",
        "flash attention",
    ):
        assert str(value) in text


def test_names_are_text_and_no_markup(result: BenchResult) -> None:
    named = replace(result, notes=("<script>alert(1)</script>",))
    assert "<script" not in render(named)


def test_a_report_is_whole_or_not_there(
    result: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        check_report(tmp_path / "none" / "report.html")
    with pytest.raises(UsageError, match="cannot be written"):
        check_report(tmp_path)
    monkeypatch.setattr(report, "render", lambda _: "x" * 10)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(DiskError):
        write_report(result, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
