"""Catalogue, downloads and set-up from the command line, against a local hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from homespec import setup
from homespec.errors import UsageError
from homespec.models.catalog import ModelFile, Pair
from homespec.models.default_pair import default_path, load_default, store_default
from homespec.models.machine import GIB, DeviceMemory, Machine, MemoryLimit
from homespec.models.pairs import find_pair
from homespec.models.references import HubFile, LocalFile
from homespec.setup import suggest
from homespec.shelf import Entry, list_pairs
from homespec.trial import Trial

from tests.hub_server import HubServer, ServedFile
from tests.tiny_gguf import tokenizer_metadata, write_tiny_gguf

HOMESPEC = [sys.executable, "-m", "homespec"]
CATALOG = """
files:
  small: {{source: "hf:user/small@main/small-Q4_K_M.gguf", size_bytes: {size}, sha256: "{sha}",
          licence: MIT}}
  helper: {{source: "hf:user/helper@main/helper-Q8_0.gguf", size_bytes: {size}}}
  other: {{source: "hf:user/other@main/other-F16.gguf"}}
  foreign: {{source: "hf:user/foreign@main/foreign-Q8_0.gguf"}}
  local: {{source: "file:tiny.gguf"}}
  huge: {{source: "hf:user/huge@main/huge.gguf", size_bytes: 999_000_000_000_000}}
pairs:
  small-pair: {{target: small, drafts: [helper], min_memory_gb: 4000, seen: yes}}
  other-pair: {{target: other, drafts: [helper]}}
  odd-pair: {{target: small, drafts: [foreign]}}
  huge-pair: {{target: huge}}
  starter: {{target: local, min_memory_gb: 2}}
"""
SMALL, HELPER = "small-Q4_K_M.gguf", "helper-Q8_0.gguf"


@dataclass
class Home:
    """A user's folders, a hub, and a catalogue of tiny models on it."""

    folder: Path
    hub: HubServer
    small: ServedFile
    helper: ServedFile

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HOMESPEC_"))}
        return clean | {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / "hf"),
            "HOMESPEC_CATALOG": str(self.folder / "models.yaml"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "NO_PROXY": "*",
        }

    def run(self, *args: object, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*HOMESPEC, *map(str, args)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.environment | env,
        )
        assert "Traceback" not in done.stderr
        return done

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*HOMESPEC, *args], cwd=self.folder, env=self.environment, **pipes)

    def path(self, *args: str) -> Path | None:
        done = self.run("path", *args)
        assert done.returncode == (0 if done.stdout else 1)
        return Path(done.stdout.strip()) if done.stdout else None

    @property
    def default(self) -> Any:
        path = self.folder / "state" / "homespec" / "default.json"
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture(autouse=True)
def one_cpu() -> Iterator[None]:
    """One thread: several wait for each other actively, which takes minutes on a busy machine."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_tiny_gguf(tmp_path / "served-draft.gguf", noise=0.05)
    pieces = tokenizer_metadata(300)["tokenizer.ggml.tokens"]
    others = {"tokenizer.ggml.tokens": [*pieces[295::-1], *pieces[296:]]}
    write_tiny_gguf(tmp_path / "served-foreign.gguf", metadata=others)
    with HubServer() as hub:
        small = hub.add("user/small", SMALL, tmp_path / "tiny.gguf")
        helper = hub.add("user/helper", HELPER, tmp_path / "served-draft.gguf")
        hub.add("user/other", "other-F16.gguf", tmp_path / "tiny.gguf")
        hub.add("user/foreign", "foreign-Q8_0.gguf", tmp_path / "served-foreign.gguf")
        catalog = CATALOG.format(size=small.size, sha=small.sha256)
        (tmp_path / "models.yaml").write_text(catalog)
        yield Home(tmp_path, hub, small, helper)


# --- pull, path, remove, models -----------------------------------------------------------------


def test_a_pair_comes_is_found_and_goes(home: Home) -> None:
    missing = home.run("path", "small-pair")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "homespec pull small-pair" in missing.stderr

    pulled = home.run("pull", "small-pair")
    assert pulled.returncode == 0
    assert SMALL in pulled.stderr
    target, draft = map(Path, pulled.stdout.splitlines())
    assert target.read_bytes() == home.small.path.read_bytes()
    assert draft.read_bytes() == home.helper.path.read_bytes()
    assert home.path("small-pair") == target
    assert home.path("small-pair", "--draft") == draft

    again = home.run("pull", "small-pair")
    assert again.stdout == pulled.stdout
    assert home.small.bytes_sent == home.small.size

    removed = home.run("remove", "small-pair", "--yes")
    assert removed.returncode == 0
    freed = home.small.size + home.helper.size
    assert f"{freed / 1e3:.0f} kB freed" in removed.stderr
    assert home.path("small-pair") is None
    assert list((home.folder / "hf").rglob("*.gguf")) == []
    nothing = home.run("remove", "small-pair", "--yes")
    assert nothing.returncode == 0
    assert "Nothing of small-pair" in nothing.stderr


def test_remove_asks_and_keeps_what_is_used_elsewhere(home: Home) -> None:
    assert home.run("pull", "small-pair").returncode == 0
    assert home.run("pull", "other").returncode == 0
    nobody = home.run("remove", "small-pair")
    assert nobody.returncode == 2
    assert "--yes" in nobody.stderr
    assert home.run("remove", "small-pair", stdin="n\n").returncode == 1
    assert home.path("small-pair") is not None
    agreed = home.run("remove", "small-pair", stdin="y\n")
    assert agreed.returncode == 0
    assert "helper stays: other-pair uses it" in agreed.stderr
    assert home.path("small-pair") is None
    assert home.path("small-pair", "--draft") is not None
    own = home.run("remove", "starter", "--yes")
    assert own.returncode == 2
    assert "not downloaded by homespec" in own.stderr
    assert (home.folder / "tiny.gguf").exists()


def test_remove_leaves_what_others_draft_with(home: Home) -> None:
    with (home.folder / "models.yaml").open("a") as catalog:
        catalog.write("  upper-pair: {target: other, drafts: [small]}\n")
    for name in ("small-pair", "other"):
        assert home.run("pull", name).returncode == 0
    kept = home.run("remove", "small", "--yes")
    assert kept.returncode == 0
    assert kept.stderr.split("\n")[:-1] == ["small stays: upper-pair uses it."]
    assert home.path("small") is not None
    assert "small stays" in home.run("remove", "small-pair", "--yes").stderr
    # A pair whose own target goes, or is not here, needs nothing more.
    assert home.run("remove", "upper-pair", "--yes").returncode == 0
    assert home.path("other") is None
    assert home.run("remove", "small", "--yes").returncode == 0
    assert home.path("small") is None


def test_remove_leaves_what_the_default_drafts_with(home: Home) -> None:
    for name in ("small-pair", "other"):
        assert home.run("pull", name).returncode == 0
    state = home.folder / "state" / "homespec"
    state.mkdir(parents=True)
    files = {"other": "other/other-F16.gguf", "small": "small/small-Q4_K_M.gguf"}
    target, draft = (
        {"name": name, "source": f"hf:user/{name}@main/{path.split('/')[1]}"}
        | {"size_bytes": None, "sha256": None}
        for name, path in files.items()
    )
    stored = {"version": 1, "name": "mine", "target": target, "drafts": [draft]}
    (state / "default.json").write_text(json.dumps(stored))
    assert "small stays: mine uses it" in home.run("remove", "small-pair", "--yes").stderr
    assert home.path("small") is not None
    assert home.default["name"] == "mine"


def test_an_interrupted_pull_goes_on_where_it_stopped(home: Home) -> None:
    home.small.faults.bytes_per_second = 150_000
    with home.start("pull", "small-pair") as child:
        deadline = time.monotonic() + 30
        while _unfinished_bytes(home) < 100_000 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        output, said = child.communicate(timeout=30)
    assert child.returncode == 130
    assert output == ""
    assert "goes on from there" in said
    assert "Traceback" not in said
    listed = json.loads(home.run("models", "--json").stdout)
    here = {entry["name"]: entry["downloaded"] for entry in listed}
    assert here["small-pair"] == "partly"

    home.small.faults.bytes_per_second = None
    assert home.run("pull", "small-pair").returncode == 0
    assert home.small.bytes_sent < home.small.size + 200_000
    assert home.path("small-pair") is not None


def _unfinished_bytes(home: Home) -> int:
    """What an unfinished download has on the disk; what was sent may still lie in sockets."""
    return sum(part.stat().st_size for part in (home.folder / "hf").rglob("*.incomplete"))


def test_an_unfinished_download_is_removed_with_its_bytes(home: Home) -> None:
    home.small.faults.cut_after, home.small.faults.cuts = 100_000, 99
    with home.start("pull", "small") as child:
        deadline = time.monotonic() + 30
        while _unfinished_bytes(home) < 100_000 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.kill()
    parts = list((home.folder / "hf").rglob("*.incomplete"))
    assert len(parts) == 1
    removed = home.run("remove", "small", "--yes")
    assert removed.returncode == 0
    assert "100 kB freed" in removed.stderr
    assert not parts[0].exists()


def test_an_unfinished_download_without_a_digest_is_seen_and_removed(home: Home) -> None:
    helper = home.hub.files["user/helper", HELPER]
    helper.faults.bytes_per_second = 150_000
    with home.start("pull", "helper") as child:
        deadline = time.monotonic() + 30
        while _unfinished_bytes(home) < 100_000 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.kill()
    held = _unfinished_bytes(home)
    assert held >= 100_000
    with (home.folder / "models.yaml").open("a") as catalog:
        catalog.write("  helper-pair: {target: helper}\n")
    listed = {entry["name"]: entry for entry in json.loads(home.run("models", "--json").stdout)}
    assert listed["helper-pair"]["downloaded"] == "partly"
    assert listed["other-pair"]["downloaded"] == "partly"
    removed = home.run("remove", "helper", "--yes")
    assert removed.returncode == 0
    assert "kB freed" in removed.stderr
    assert _unfinished_bytes(home) == 0
    assert "Nothing of helper" in home.run("remove", "helper", "--yes").stderr
    helper.faults.bytes_per_second = None
    assert home.run("pull", "helper").returncode == 0
    assert not list((home.folder / "hf").rglob("*.incomplete*"))


def test_the_list_says_what_fits_and_what_is_here(home: Home) -> None:
    home.run("pull", "small")
    listed = json.loads(home.run("models", "--json").stdout)
    entries = {entry["name"]: entry for entry in listed}
    assert {"small-pair", "qwen3-8b", "llama-3.3-70b"} <= entries.keys()
    assert entries["small-pair"]["downloaded"] == "target"
    assert entries["small-pair"]["target"]["path"].endswith(SMALL)
    assert entries["small-pair"]["seen"] is True
    assert entries["other-pair"]["downloaded"] == "no"
    assert entries["starter"]["downloaded"] == "yes"
    assert entries["starter"]["fit"]["verdict"] == "fits"
    assert entries["starter"]["fit"]["estimated"] is False
    assert entries["huge-pair"]["downloaded"] == "no"
    assert entries["huge-pair"]["fit"]["verdict"] == "refused"
    table = home.run("models").stdout.splitlines()
    assert len([line for line in table if line.startswith("small-pair")]) == 1
    [huge] = [line for line in table if line.startswith("huge-pair")]
    assert "no: needs about" in huge


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["pull", "small-pear"], 2, "Did you mean small-pair"),
        (["pull", "huge-pair"], 4, "needs 999000 GB"),
        (["pull", "user/small:Q8_0"], 2, "There are: Q4_K_M"),
        (["pull", "user/none"], 4, "does not exist"),
        (["pull", "small-pair", "--offline"], 4, "offline mode"),
        (["pull", "nowhere.gguf"], 2, "no file"),
        (["path", "starter", "--draft"], 2, "no draft"),
        (["path", "user/small"], 1, "homespec pull user/small"),
        (["models", "--catalog", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["generate", "-hf", "small", "hi"], 2, "user/repo:QUANT"),
        (["generate", "-m", "small-pair", "--offline", "hi"], 4, "offline mode"),
        (["doctor", "-m", "small-pear"], 2, "small-pair"),
        (["generate", "-m", "~no-such-user/x.gguf", "hi"], 2, "no home folder"),
        (["generate", "-m", "x" * 300, "hi"], 2, "no pair"),
        (["generate", "-m", f"./{'x' * 300}.gguf", "hi"], 2, "no file"),
        (["pull", "https://[x/y.gguf"], 2, "no file on a web server"),
        (["pull", f"https://host/{'x' * 250}.gguf"], 2, "no file on a web server"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(home: Home, args: list[str], code: int, words: str) -> None:
    done = home.run(*args)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_a_terminal_shows_both_files_with_bytes_rate_and_time(home: Home) -> None:
    home.small.faults.bytes_per_second = 250_000
    child = pexpect.spawn(
        HOMESPEC[0],
        [*HOMESPEC[1:], "pull", "small-pair"],
        cwd=str(home.folder),
        env=home.environment | {"TERM": "xterm-256color", "COLUMNS": "120"},
        encoding="utf-8",
        timeout=30,
    )
    child.expect(pexpect.EOF)
    shown = str(child.before)
    child.close()
    assert child.exitstatus == 0
    assert shown.count(SMALL) > 2
    assert HELPER in shown
    for part in ("kB/s", "kB", "0:00:0"):
        assert part in shown


# --- names --------------------------------------------------------------------------------------


def test_a_name_means_the_same_in_every_command(home: Home) -> None:
    whole = home.run("generate", "-m", "tiny.gguf", "-q", "-n", 8, "--temp", 0, "Hello")
    assert whole.returncode == 0
    for name in (
        ["-hf", "user/small:q4_k_m", "-hfd", "user/helper:Q8_0"],
        ["-m", "user/small"],
        ["-m", "small", "-md", "helper"],
        ["-m", f"{home.hub.url}/user/small/resolve/main/{SMALL}"],
    ):
        done = home.run("generate", *name, "-q", "-n", 8, "--temp", 0, "Hello")
        assert done.returncode == 0, done.stderr
        assert done.stdout == whole.stdout
    assert home.path("user/small") is not None
    home.hub.__exit__()
    offline = ["generate", "-hf", "user/small", "--offline", "-q", "-n", "8", "--temp", "0"]
    assert home.run(*offline, "Hello").stdout == whole.stdout


def test_a_name_without_a_draft_of_its_own_takes_one() -> None:
    pair = find_pair("qwen3-8b", "qwen2.5-0.5b-q4_k_m")
    assert [draft.name for draft in pair.drafts] == ["qwen2.5-0.5b-q4_k_m"]
    assert pair.target == find_pair("qwen3-8b").target
    assert find_pair(Path("qwen3-8b")).target.source == LocalFile(Path("qwen3-8b"))


def test_a_default_needs_no_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_default() is None
    assert find_pair().name == "starter"
    draft = ModelFile("d", HubFile("user/repo", "abc", "d.gguf", 5, "ab" * 32))
    stored = Pair("mine", ModelFile("t", LocalFile(Path("t.gguf"))), (draft,))
    store_default(stored)
    local = ModelFile("t", LocalFile(tmp_path / "t.gguf"))
    assert load_default() == replace(stored, target=local)
    assert find_pair() == load_default()
    assert find_pair(None, "starter").drafts[0].name == "smollm2-135m-q4_1"
    for damage in ("{", "[]", '{"version": 1}', '{"version": 2, "name": "a"}'):
        default_path().write_text(damage)
        with pytest.raises(UsageError, match=r"default\.json cannot be read"):
            find_pair()


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "-m", "small-pair", "hi"],
        ["chat", "small-pair", "-p", "hi"],
        ["serve", "small-pair", "--port", "0"],
        ["batch", "small-pair", "-i", "models.yaml", "-o", "answers.jsonl"],
    ],
    ids=lambda args: args[0],
)
def test_nothing_is_fetched_of_what_does_not_fit(home: Home, args: list[str]) -> None:
    done = home.run(*args, "--reserve", "900000G")
    assert done.returncode == 3, done.stderr
    assert "does not fit" in done.stderr or "needs" in done.stderr
    assert home.path("small-pair") is None
    assert not list((home.folder / "hf").rglob("*.incomplete"))


def test_a_draft_that_does_not_suit_costs_no_download(home: Home) -> None:
    done = home.run("generate", "-m", "small", "-md", "foreign", "hi")
    assert done.returncode == 3
    assert "cannot draft for" in done.stderr
    assert home.path("small") is None


def test_where_no_draft_is_to_draft_none_is_fetched(home: Home) -> None:
    short = ["-n", 4, "--temp", 0]
    whole = home.run("generate", "-m", "tiny.gguf", "-q", *short, "Hello")
    for kind in ("ngram", "none"):
        done = home.run("generate", "-m", "odd-pair", "--spec-type", kind, "-q", *short, "Hello")
        assert (done.returncode, done.stdout) == (0, whole.stdout), done.stderr
    talked = home.run("chat", "odd-pair", "--spec-type", "ngram", *short, stdin="Hello")
    assert (talked.returncode, talked.stdout) == (0, whole.stdout), talked.stderr
    assert home.path("foreign") is None
    shown = home.run("generate", "-m", "odd-pair", "--spec-type", "none", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "drafts from nothing" in shown.stdout


# --- setup --------------------------------------------------------------------------------------


def test_setup_ends_with_a_tried_default(home: Home) -> None:
    done = home.run("setup", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["name"] == "small-pair"
    shown = home.run("tune", "--show", "small-pair")
    assert shown.returncode == 0, shown.stderr
    assert found["instead_of"] is None
    trial = found["trial"]
    assert trial["drafting"] == "draft_model"
    assert trial["num_prompts"] == 4
    assert trial["plain_tokens_per_second"] > 0
    assert trial["acceptance_rate"] > 0.3  # nearly the target itself
    assert trial["mean_acceptance_length"] == pytest.approx(
        1 + 3 * trial["acceptance_rate"], rel=0.2
    )
    # The draft is kept where it paid, and only there.
    kept = trial["num_drafted"] and trial["acceptance_rate"] >= 0.05 and trial["speed_ratio"] >= 1
    assert (found["draft"] is not None) == bool(kept) == (trial["objection"] is None)
    if not kept:
        assert f"helper is not used: {trial['objection']}" in done.stderr
    assert home.default["name"] == "small-pair"
    assert len(home.default["drafts"]) == (1 if kept else 0)
    assert home.path() == home.path("small-pair")

    answer = home.run("generate", "-q", "-n", 8, "--temp", 0, "Hello")
    named = home.run("generate", "-m", "tiny.gguf", "-q", "-n", 8, "--temp", 0, "Hello")
    assert answer.stdout == named.stdout != ""
    removed = home.run("remove", "small-pair", "--yes")
    assert "It was the default" in removed.stderr
    assert home.default is None


def test_the_default_keeps_the_context_it_was_set_up_with(home: Home) -> None:
    done = home.run("setup", "tiny.gguf", "-c", 400, "--yes", "--no-tune")
    assert done.returncode == 0, done.stderr
    assert home.default["n_ctx"] == 400
    assert "Context 400," in home.run("generate", "--dry-run").stdout
    assert "Context 64," in home.run("generate", "--dry-run", "-c", 64).stdout
    assert "Context 256," in home.run("generate", "--dry-run", HOMESPEC_CTX_SIZE="256").stdout
    checked = json.loads(home.run("check", "--json").stdout)
    assert checked["plan"]["target"]["n_ctx"] == 400
    del (stored := home.default)["n_ctx"]  # as an older homespec stored it
    (home.folder / "state" / "homespec" / "default.json").write_text(json.dumps(stored))
    assert "Context 4096," in home.run("generate", "--dry-run").stdout


def test_tuning_within_setup_plans_for_the_context_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    class Quiet(setup.Guide):
        def note(self, text: str) -> None:
            pass

        def working(self, text: str) -> None:
            pass

        def measuring(self) -> AbstractContextManager[Any]:
            return nullcontext(lambda *_: None)

    asked: list[Any] = []
    monkeypatch.setattr(setup, "tune_pair", lambda *_, load, progress: asked.append(load))
    monkeypatch.setattr(setup, "load_profile", lambda *_: (None, ""))
    setup._tune(tiny, None, 1024, Quiet())
    assert [load.n_ctx for load in asked] == [1024]


def test_setup_asks_after_showing_the_plan(home: Home) -> None:
    declined = home.run("setup", "small-pair", stdin="n\n")
    assert declined.returncode == 1
    assert "Memory" in declined.stdout
    assert "Download 914 kB" in declined.stderr
    assert home.run("setup", "small-pair").returncode == 2
    assert home.default is None
    assert home.path("small-pair") is None


def test_setup_of_a_single_model_tells_of_a_draft_that_does_not_fit(home: Home) -> None:
    done = home.run("setup", "odd-pair", "--yes", "--no-tune")
    assert done.returncode == 0, done.stderr
    assert "foreign cannot draft for small" in done.stderr
    assert "acceptance length" in done.stdout
    assert home.default["drafts"] == []
    assert home.default["target"]["sha256"] == home.small.sha256


def test_without_a_network_the_starter_is_set_up(home: Home) -> None:
    home.hub.__exit__()
    done = home.run("setup", "small-pair", "--yes", "--no-tune")
    assert done.returncode == 0, done.stderr
    assert "could not be reached" in done.stderr
    assert "takes the place of small-pair" in done.stderr
    assert home.default["name"] == "starter"
    offline = home.run("setup", "--yes", "--json", "--offline", "--no-tune")
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout)["instead_of"] == "small-pair"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["no-such-pair"], 2, "no pair no-such-pair"),
        (["user/none"], 4, "does not exist"),
        (["./text.gguf"], 3, "not a GGUF"),
    ],
)
def test_setup_refuses_what_cannot_be(home: Home, args: list[str], code: int, words: str) -> None:
    (home.folder / "text.gguf").write_text("no model at all, but long enough to be looked at")
    done = home.run("setup", "--yes", *args)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert home.default is None


def test_setup_refuses_what_does_not_fit(home: Home) -> None:
    limited = f"ulimit -v 1500000; exec {' '.join(HOMESPEC)} setup tiny.gguf -c 4000000 --yes"
    done = subprocess.run(
        ["bash", "-c", limited],
        capture_output=True,
        text=True,
        check=False,
        cwd=home.folder,
        env=home.environment | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 3, done.stderr
    assert "does not fit" in done.stderr
    assert "-c " in done.stderr
    assert home.default is None


def machine_of(ram: int, *devices: DeviceMemory) -> Machine:
    return Machine((MemoryLimit("machine", ram * GIB, int(ram * 0.9) * GIB),), devices)


def gpu_of(size: int) -> DeviceMemory:
    return DeviceMemory("CUDA0", size * GIB, int(size * 0.95 * GIB))


@pytest.mark.parametrize(
    ("machine", "cores", "best"),
    [
        (machine_of(2), 2, "smollm2-360m"),
        (machine_of(4), 2, "gemma-3-1b"),
        (machine_of(16), 2, "qwen2.5-coder-1.5b"),
        (machine_of(16), 8, "qwen3-8b"),
        (machine_of(16, gpu_of(8)), 2, "qwen3-8b"),
        (machine_of(64, gpu_of(24)), 8, "qwen2.5-coder-32b"),
        (machine_of(64, replace(gpu_of(32), kind="igpu", unified=True)), 4, "qwen2.5-7b"),
    ],
)
def test_the_best_pair_suits_memory_cores_and_devices(
    machine: Machine, cores: int, best: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    entries = list_pairs(machine=machine)
    proposed = [pair.name for pair in suggest(entries, machine, cores)]
    assert proposed[0] == best
    assert proposed[-1] == "starter"
    assert "qwen2.5-3b" not in proposed  # forbids commercial use
    fitting = {entry.pair.name for entry in entries if entry.fit.verdict == "fits"}
    assert set(proposed) <= fitting | {"starter"}


def trial(**changes: Any) -> Trial:
    usual = Trial("draft_model", 4, 4, 90, 10.0, 13.0, 0.7, 2.4)
    return replace(usual, **changes)


def test_a_draft_is_judged_by_what_it_did() -> None:
    assert trial().objection is None
    assert trial().speed_ratio == pytest.approx(1.3)
    assert "2%" in str(trial(acceptance_rate=0.02).objection)
    assert "0.90 x plain" in str(trial(tokens_per_second=9.0).objection)
    assert "cost more" in str(trial(num_drafted=0).objection)
    assert trial(plain_tokens_per_second=0.0).objection is not None


def test_an_entry_of_json_holds_plain_values_only() -> None:
    for entry in list_pairs(machine=machine_of(16)):
        assert isinstance(entry, Entry)
        assert json.loads(json.dumps(entry.as_dict())) == entry.as_dict()
