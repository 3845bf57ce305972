"""`homespec check` as a user meets it: files, the hub by ranges, limits, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from homespec.checking import check, read
from homespec.cli.sizes import memory_size
from homespec.cli.tables import print_report
from homespec.engine import LoadParams
from homespec.errors import ModelError, PlanError, UsageError
from homespec.models.catalog import load_catalog
from homespec.models.gguf_header import read_header
from homespec.models.machine import GIB, Machine, MemoryLimit
from homespec.models.memory_plan import AUTO, PlanRequest
from homespec.planning import candidates, plan_for, request_for, this_machine

from tests.conftest import PairFiles
from tests.hub_server import HubServer
from tests.shaped_gguf import write_shaped_gguf
from tests.tiny_gguf import tokenizer_metadata, write_tiny_gguf

MIB = 1 << 20
TOP = Path(__file__).parent.parent


def homespec(*args: object, limit_kib: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """`homespec check` in a process of its own, perhaps under `ulimit -v`."""
    command = [sys.executable, "-m", "homespec", "check", *map(str, args)]
    if limit_kib:
        command = ["bash", "-c", f'ulimit -v {limit_kib} && exec "$@"', "bash", *command]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"} | env,
        timeout=120,
    )


def small(total: float, free: float) -> Machine:
    return Machine((MemoryLimit("machine", int(total * GIB), int(free * GIB)),))


# --- the verdicts -------------------------------------------------------------------------------


def test_a_pair_that_works(tiny: Path, tiny_draft: Path) -> None:
    done = homespec(tiny, tiny_draft, "-c", 256)
    assert done.returncode == 0, done.stderr
    assert "the same tokenizer" in done.stdout
    assert "fits:" in done.stdout
    assert "Context 256" in done.stdout
    assert f"{tiny_draft.name} in RAM" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_pair_of_other_tokenizers_is_refused(tiny: Path, tmp_path: Path) -> None:
    pieces = tokenizer_metadata(300)["tokenizer.ggml.tokens"]
    other = write_tiny_gguf(
        tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": [f"{p}~" for p in pieces]}
    )
    done = homespec(tiny, other)
    assert done.returncode == 3
    assert "FAIL" in done.stdout
    assert "refused: The draft cannot draft for this target: 300 of 300 ids differ" in done.stdout
    assert "hint:" in done.stdout
    report = check(tiny, other)
    assert not report.usable
    assert report.plan.draft is None


def test_the_starter_needs_no_draft() -> None:
    report = check("starter", machine=small(8, 6))
    assert report.usable
    assert report.drafts == ()
    assert report.plan.drafting == "ngram"
    assert report.target.quantization == "Q4_1"


def test_json_is_one_object(tiny: Path, tiny_draft: Path) -> None:
    done = homespec(tiny, tiny_draft, "--json")
    found = json.loads(done.stdout)
    assert found["usable"] is True
    assert found["plan"]["verdict"] == "fits"
    assert found["drafts"][0]["compatibility"]["verdict"] == "same"
    assert {test["outcome"] for test in found["drafts"][0]["compatibility"]["tests"]} == {"pass"}


def test_the_reserve_is_kept(starter: Path) -> None:
    total = this_machine().ram_total_bytes
    done = homespec(starter, "--reserve", f"{total // MIB + 1}M")
    assert done.returncode == 3
    assert f"refused: {starter.name} needs" in done.stdout
    assert "in reserve" in done.stdout


def test_a_refusal_says_what_would_fit(starter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = small(2, 1.3)
    report = check(starter, request=PlanRequest(n_ctx=16384), machine=where)
    assert not report.usable
    print_report(report)
    told = re.search(
        r"hint: It would fit with a context of .*\(-c (\d+)\)", capsys.readouterr().out
    )
    assert told
    n_ctx = int(told[1])
    assert check(starter, request=PlanRequest(n_ctx=n_ctx), machine=where).usable
    assert not check(starter, request=PlanRequest(n_ctx=2 * n_ctx), machine=where).usable


def test_words_of_a_header_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pieces = list(tokenizer_metadata(300)["tokenizer.ggml.tokens"])
    names = {"general.name": "x [/b] :dog: [bold]y[/bold]"}
    target = write_tiny_gguf(tmp_path / "[i]t.gguf", metadata=names)
    pieces[200] = "[/INST]"
    draft = write_tiny_gguf(
        tmp_path / "[b]d.gguf", metadata={**names, "tokenizer.ggml.tokens": pieces}
    )
    print_report(check(target, draft, PlanRequest(n_ctx=256), machine=small(8, 6)))
    shown = capsys.readouterr().out
    assert shown.count(names["general.name"]) == 3  # two models, and the verdict on the draft
    assert "[/INST]" in shown
    assert "[b]d.gguf in RAM" in shown


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    bert = write_tiny_gguf(tmp_path / "bert.gguf", architecture="bert")
    done = homespec(bert)
    assert done.returncode == 3
    assert "encoder-only" in done.stderr
    with pytest.raises(ModelError):
        check(bert)


def test_what_names_nothing_is_a_usage_error(tmp_path: Path) -> None:
    assert homespec(tmp_path / "absent.gguf").returncode == 2
    assert homespec("no-such-pair").returncode == 2
    assert homespec("starter", "--reserve", "much").returncode == 2
    with pytest.raises(UsageError):
        check("no-such-pair")


# --- on the hub ---------------------------------------------------------------------------------


def hub_environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "*",
    }


def check_on_the_hub(target: Path, draft: Path, tmp_path: Path) -> None:
    """Both are judged from a few megabytes each, and nothing is kept."""
    with HubServer() as hub:
        files = [
            hub.add("user/target-GGUF", "target-Q4_K_M.gguf", target),
            hub.add("user/draft-GGUF", "draft-q8_0.gguf", draft),
        ]
        began = time.monotonic()
        done = homespec(
            "user/target-GGUF",
            "hf:user/draft-GGUF@main/draft-q8_0.gguf",
            "--json",
            **hub_environment(hub, tmp_path),
        )
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["drafts"][0]["compatibility"]["verdict"] == "same"
        assert all(file.bytes_sent > 0 for file in files)
        assert sum(file.bytes_sent for file in files) < 32_000_000
        assert seconds < 5
    assert not list(tmp_path.rglob("*.gguf*"))


def test_two_hub_references_by_ranges(starter: Path, tmp_path: Path) -> None:
    check_on_the_hub(starter, starter, tmp_path)


def test_the_reference_pair_on_the_hub_by_ranges(pair: PairFiles, tmp_path: Path) -> None:
    check_on_the_hub(pair.target, pair.draft, tmp_path)


def test_a_part_that_is_missing_on_the_hub_is_named(tmp_path: Path) -> None:
    with HubServer() as hub:
        first = write_tiny_gguf(tmp_path / "first.gguf")
        hub.add("user/split", "m-00001-of-00002.gguf", first)
        done = homespec(
            "hf:user/split@main/m-00001-of-00002.gguf", **hub_environment(hub, tmp_path)
        )
    assert done.returncode in (2, 4)
    assert "m-00002-of-00002.gguf" in done.stderr
    assert "Traceback" not in done.stderr


# --- under a limit ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits hold on Linux alone")
def test_700_mb_refuse_the_reference_pair_and_name_one_that_fits(pair: PairFiles) -> None:
    done = homespec(pair.target, pair.draft, limit_kib=700_000)
    assert done.returncode == 3, done.stderr
    assert "ulimit -v" in done.stdout
    hint = next(line for line in done.stdout.splitlines() if line.startswith("hint:"))
    name, *flags = hint.partition("These would fit: ")[2].rstrip(".").split(",")[0].split()
    assert name in load_catalog().pairs
    again = homespec(name, *flags, limit_kib=700_000)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits hold on Linux alone")
def test_what_fits_under_700_mb_runs_under_700_mb(starter: Path) -> None:
    assert homespec(starter, limit_kib=700_000).returncode == 0
    generate = [sys.executable, "-m", "homespec", "generate", "-m", str(starter), "-n", "4", "Hi"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 700000 && exec "$@"', "bash", *generate],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# --- the parts between --------------------------------------------------------------------------


def test_this_machine_tells_its_features_and_memory() -> None:
    machine = this_machine()
    assert machine.cpu_features
    assert machine.ram_free_bytes > 0


def test_a_request_has_the_engines_settings() -> None:
    params = LoadParams(n_ctx=777, cache_type_v="q8_0", draft_devices=("GPU1",), mmap=False)
    request = request_for(params, reserve_bytes=5)
    assert request.n_ctx == 777
    assert request.cache_type_v == "q8_0"
    assert request.draft_devices == ("GPU1",)
    assert request.mmap is False
    assert request.gpu_layers == AUTO == params.gpu_layers
    assert request.reserve_bytes == 5


def test_a_refused_plan_names_pairs_of_the_catalogue(tmp_path: Path) -> None:
    large = read_header(write_shaped_gguf(tmp_path / "large.gguf", "llama-3.3-70b"))
    with pytest.raises(PlanError) as error:
        plan_for(large, [], PlanRequest(), machine=small(12, 10), catalog=load_catalog())
    named = str(error.value.hint).partition("would fit: ")[2].rstrip(".").split(", ")
    assert named
    assert all(name.split()[0] in load_catalog().pairs for name in named)


def test_candidates_are_other_models_and_other_quantizations(tmp_path: Path) -> None:
    catalog = load_catalog()
    path = tmp_path / "qwen2.5-coder-0.5b-instruct-q8_0.gguf"
    header = read_header(write_shaped_gguf(path, "qwen2.5-0.5b"))
    found = {candidate.name: candidate for candidate in candidates(catalog, header)}
    assert found["qwen2.5-coder-0.5b-q4_k_m"].same_model
    assert "qwen2.5-coder-0.5b-q8_0" not in found  # the very file
    assert set(catalog.pairs) <= set(found)
    assert found["qwen3-8b"].target_bytes > found["qwen3-8b"].draft_bytes > 0


def test_reading_a_model_reads_its_header(starter: Path) -> None:
    file = load_catalog().get("starter").target
    assert read(file).tensors == read_header(starter).tensors


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1024), ("512M", 512 * MIB), ("1.5GiB", 3 * GIB // 2), ("2 gb", 2 * GIB)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    context, option = click.Context(click.Command("x")), click.Option(["--reserve"])
    assert memory_size(context, option, text) == size
    assert memory_size(context, option, None) is None
    with pytest.raises(click.BadParameter):
        memory_size(context, option, f"-{text}")
