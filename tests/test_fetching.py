"""What is fetched of a pair: planned from headers first, against a local hub over real HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import homespec
import pytest
from homespec import checking, planning
from homespec.errors import IncompatiblePairError, NetworkError, PlanError
from homespec.fetching import fetch_planned, params_for
from homespec.loading import LoadParams
from homespec.models import sources
from homespec.models.catalog import ModelFile, Pair
from homespec.models.default_pair import store_default
from homespec.models.references import HubFile, LocalFile, WebFile

from tests.hub_server import HubServer
from tests.tiny_gguf import tokenizer_metadata, write_tiny_gguf

PARAMS = LoadParams(n_ctx=256, threads=1, reserve_bytes=0)
GIB = 1 << 30
Room = Callable[[int], None]


@dataclass
class Served:
    """A target, a draft that is larger than it, a small one, and one of another vocabulary."""

    hub: HubServer
    folder: Path

    def __post_init__(self) -> None:
        pieces = tokenizer_metadata(300)["tokenizer.ggml.tokens"]
        for name, path in (
            ("target", write_tiny_gguf(self.folder / "t")),
            ("large", write_tiny_gguf(self.folder / "l", n_layers=60)),
            ("small", write_tiny_gguf(self.folder / "s", noise=0.1)),
            (
                "foreign",
                write_tiny_gguf(
                    self.folder / "f", metadata={"tokenizer.ggml.tokens": [f"{p}~" for p in pieces]}
                ),
            ),
        ):
            self.hub.add(f"user/{name}", f"{name}.gguf", path)

    def pair(self, *drafts: str) -> Pair:
        target, *others = (
            ModelFile(name, HubFile(f"user/{name}", "main", f"{name}.gguf"))
            for name in ("target", *drafts)
        )
        return Pair("pair", target, tuple(others))

    @property
    def here(self) -> set[str]:
        """What has come to this machine, whole or not."""
        return {path.stem for path in (self.folder / "hf").rglob("snapshots/*/*")} | {
            path.name for path in (self.folder / "hf").rglob("*.incomplete")
        }


@pytest.fixture
def served(hub: HubServer, tmp_path: Path) -> Served:
    return Served(hub, tmp_path)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Sets the memory that this machine says is free."""
    roomy = planning.this_machine()

    def set_free(free_bytes: int) -> None:
        machine = replace(roomy, limits=(replace(roomy.limits[0], free_bytes=free_bytes),))
        monkeypatch.setattr(checking, "this_machine", lambda: machine)

    return set_free


def test_what_does_not_fit_is_refused_before_its_download(served: Served, room: Room) -> None:
    room(1 << 20)
    with pytest.raises(PlanError, match="needs"):
        fetch_planned(served.pair("small"), PARAMS)
    assert served.here == set()


def test_the_plan_asks_for_what_the_load_asks_for(served: Served, room: Room) -> None:
    header = planning.local_header(served.folder / "t")
    small = planning.request_for(PARAMS)
    room(planning.plan_for(header, [], small).total_bytes + (1 << 20))
    fetch_planned(served.pair(), PARAMS)
    sources.remove(served.pair().target.source)
    with pytest.raises(PlanError):
        fetch_planned(served.pair(), replace(PARAMS, n_ctx=65536))
    assert served.here == set()


def test_the_next_smaller_draft_is_fetched_where_the_first_does_not_fit(
    served: Served, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    headers = [planning.local_header(served.folder / name) for name in "ts"]
    both = planning.plan_for(headers[0], headers[1:], planning.request_for(PARAMS))
    needed = sum(model.parts["RAM"].total for model in (both.target, both.draft) if model)
    room(needed + (1 << 20))
    target, draft = fetch_planned(served.pair("large", "small"), PARAMS)
    assert (target.name, draft and draft.name) == ("target.gguf", "small.gguf")
    assert served.here == {"target", "small"}
    assert "small.gguf drafts instead" in caplog.text
    room(GIB)
    _, draft = fetch_planned(served.pair("large"), PARAMS)
    assert draft is not None
    assert served.here == {"target", "small", "large"}


def test_what_is_here_is_used_and_nobody_is_asked(served: Served) -> None:
    pair = served.pair("large", "small")
    for file in (pair.target, pair.drafts[1]):
        sources.fetch(file.source)
    asked = len(served.hub.requests)
    for offline in (False, True):
        _, draft = fetch_planned(pair, PARAMS, offline=offline)
        assert draft is not None
        assert draft.name == "small.gguf"
    assert len(served.hub.requests) == asked
    sources.fetch(pair.drafts[0].source)
    _, draft = fetch_planned(pair, PARAMS)
    assert draft is not None
    assert draft.name == "large.gguf"


def test_offline_asks_nobody_for_what_is_missing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NetworkError, match="offline mode"):
        fetch_planned(served.pair("small"), PARAMS, offline=True)
    sources.fetch(served.pair().target.source)
    asked = len(served.hub.requests)
    with pytest.raises(NetworkError, match="offline mode"):
        fetch_planned(served.pair("small"), PARAMS, offline=True, needs_draft=True)
    # A draft that had no room is never fetched: that must not end the use of the target offline.
    target, draft = fetch_planned(served.pair("small"), PARAMS, offline=True)
    assert (target.name, draft) == ("target.gguf", None)
    assert "small.gguf is not on this machine" in caplog.text
    assert len(served.hub.requests) == asked


def test_a_target_that_is_here_needs_no_hub(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    sources.fetch(served.pair().target.source)
    served.hub.__exit__()
    _, draft = fetch_planned(served.pair("small"), PARAMS)
    assert draft is None
    assert "could not be reached" in caplog.text
    assert "N-grams draft instead" in caplog.text
    with pytest.raises(NetworkError, match="could not be reached"):
        fetch_planned(served.pair("small"), PARAMS, needs_draft=True)


def test_a_draft_that_cannot_draft_is_told_before_the_download(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(IncompatiblePairError, match=r"foreign\.gguf cannot draft for target\.gguf"):
        fetch_planned(served.pair("foreign"), PARAMS)
    assert served.here == set()
    _, draft = fetch_planned(served.pair("foreign", "small"), PARAMS)
    assert draft is not None
    assert draft.name == "small.gguf"
    assert "foreign cannot draft for target" in caplog.text
    assert "foreign" not in served.here


def test_a_server_without_ranges_sends_the_whole_file_at_once(
    served: Served, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "wordy", vocab_size=18_000)  # a header of half a megabyte
    file = served.hub.add("user/wordy", "wordy.gguf", path)
    file.faults.no_ranges = True
    source = WebFile(f"{served.hub.url}/lfs/user/wordy/wordy.gguf")
    pair = Pair("wordy", ModelFile("wordy", source))
    with pytest.raises(NetworkError, match="does not give parts"):
        homespec.checking.check(str(source))
    assert fetch_planned(pair, PARAMS)[0].read_bytes() == path.read_bytes()


def test_the_context_of_the_default_holds_where_none_is_given(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pair = Pair("mine", ModelFile("tiny", LocalFile(tiny)), n_ctx=128)
    assert params_for(pair, {"n_ctx": 64}).n_ctx == 64
    assert params_for(replace(pair, n_ctx=None), {}).n_ctx == LoadParams().n_ctx
    store_default(pair)
    with homespec.load(threads=1) as engine:
        assert engine.context.n_ctx == 128
    with homespec.load(threads=1, n_ctx=256) as engine:
        assert engine.context.n_ctx == 256
