"""`homespec bench` as a user meets it: output, files, errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from homespec.cli.bench import told_command

BENCH = [sys.executable, "-m", "homespec", "bench"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"category": name, "prompt": f"{text} {i}"}
        for i in range(6)
        for name, text in (("chat", "Hello"), ("code", "def f():"))
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def bench(*args: object, code: int = 0, command: list[str] | None = None) -> tuple[str, str]:
    done = subprocess.run(
        [*(command or []), *BENCH, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HOMESPEC_BENCH_THREADS": "1", "COLUMNS": "100"},
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_tables_verdict_and_report(
    tiny: Path, tiny_draft: Path, prompts: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    said, _ = bench(
        "-m", tiny, "-md", tiny_draft, "--prompts", prompts, "-n", 64, "-c", 512,
        "--arm", "plain", "--arm", "plain,sleep=100%",
        "--arm", "spec-type=draft_model,depth=fixed:4", "--report", report,
    )  # fmt: skip
    for part in ("first token", "tok/s", "verify", "peak memory", "chat", "code", "Cold start"):
        assert part in said
    assert re.search(r"plain,sleep=100% is slower than plain: decoding 0\.\d{3} x", said)
    assert "12 of 12" in said
    assert "Accepted, by position in the draft" in said
    assert report.read_text("utf-8").startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []


def test_the_record_of_the_command_tells_no_folder_and_no_key() -> None:
    words = [
        "bench",
        "-m",
        "/home/me/a b.gguf",
        "--report=/tmp/x/r.html",
        "--against-key",
        "s3cret",
    ]
    told = told_command([*words, "--against-key=s3cret", "--against", "http://host:1/v1"])
    assert told == (
        "homespec bench -m 'a b.gguf' --report=r.html --against-key KEY --against-key=KEY "
        "--against http://host:1/v1"
    )


def test_json_can_be_compared(tiny: Path, prompts: Path, tmp_path: Path) -> None:
    files = []
    for number, length in enumerate((16, 12)):
        said, _ = bench("-m", tiny, "--prompts", prompts, "-n", length, "-c", 512, "--json")
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(said)
    values = json.loads(files[0].read_text())
    assert [arm["name"] for arm in values["arms"]] == ["plain", "auto"]
    assert len(values["runs"]) == 24
    assert str(tiny.parent) not in values["settings"]["command"]
    said, warned = bench("--compare", *files)
    assert re.search(r"plain: .*\d\.\d{3} x", said)
    assert "settings.max_tokens" in said
    assert "not of the same length" in warned
    compared = json.loads(bench("--compare", *files, "--json")[0])
    assert {"arms", "differences", "verdicts"} <= compared.keys()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--arm", "speed=3"], 2, "is no setting of an arm"),
        (["--report", "/nonexistent/r.html"], 2, "cannot be written"),
        (["--prompts", "/nonexistent.jsonl"], 2, "cannot be read"),
        (["--compare", "/nonexistent.json", "/nonexistent.json"], 2, "cannot be read"),
        (["--against", "http://127.0.0.1:9/v1"], 4, "cannot be reached"),
        (["--against", "localhost"], 2, "is no address"),
        (["--arm", "spec-type=draft_model"], 2, "needs a draft model"),
    ],
)
def test_what_cannot_be_meant_is_told_at_once(
    tiny: Path, args: list[str], code: int, said: str
) -> None:
    began = time.monotonic()
    out, err = bench("-m", tiny, *args, code=code)
    assert said in err
    assert "hint:" in err or code == 2
    assert out == ""
    assert "Traceback" not in err
    assert time.monotonic() - began < 20


def test_an_interrupt_tells_what_there_is(tiny: Path, prompts: Path) -> None:
    command = [*BENCH, "-m", tiny, "--prompts", prompts, "--repeats", 500, "-c", 512, "--json"]
    running = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while psutil.Process(running.pid).cpu_times().user < 6:  # it measures, on any machine
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    said, warned = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "interrupted" in warned
    values = json.loads(said)
    assert values["interrupted"]
    assert {run["arm"] for run in values["runs"]} == {0, 1}


def test_peak_memory_is_the_kernels(starter: Path, prompts: Path) -> None:
    clock = Path("/usr/bin/time")
    if not clock.exists() or "GNU" not in _version(clock):
        pytest.skip("GNU time is not installed (Debian's package: time)")
    said, seen = bench(
        "-m", starter, "--prompts", prompts, "--per-category", 2, "-n", 8, "--json",
        command=[str(clock), "-v"],
    )  # fmt: skip
    kibibytes = re.search(r"Maximum resident set size \(kbytes\): (\d+)", seen)
    assert kibibytes is not None
    told = json.loads(said)["environment"]["peak_rss_bytes"]
    assert told == pytest.approx(int(kibibytes[1]) * 1024, rel=0.03)


def _version(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_script_compares_category_by_category(
    tiny: Path, tiny_draft: Path, prompts: Path, tmp_path: Path
) -> None:
    pair = tmp_path / "pair"
    pair.mkdir()
    for model in (tiny, tiny_draft):
        (pair / model.name).symlink_to(model)
    script = Path(__file__).parent.parent / "scripts" / "compare"
    found = tmp_path / "found.json"
    flags = ["--prompts", prompts.parent, "--pair", pair, "--json", found, "--tokens", 8]
    done = subprocess.run(
        list(map(str, [sys.executable, script, *flags, "--per-category", 3, "--warm"])),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^chat +\d\.\d\d x plain \(.*\), \d\.\d\d tokens a pass$", done.stdout, re.M)
    assert "geometric mean over 9 prompts" in done.stdout
    assert {len(ratios) for ratios in json.loads(found.read_text())["ratios"].values()} == {3, 6}
