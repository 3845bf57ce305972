"""Models for the tests: a tiny random one, the starter, and the reference pair where it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from homespec.engine import Engine, LoadParams
from homespec.llama.library import use_exact_kernels
from homespec.models import sources, transfer
from homespec.models.catalog import load_catalog

from tests.hub_server import HubServer
from tests.tiny_gguf import write_tiny_gguf

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests compare bits, and a GPU's depend on the width of a pass: without a word of yours in one
# of these variables they run on the CPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("HIP_VISIBLE_DEVICES", "-1")
os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "")
use_exact_kernels()  # for the whole session: llama.cpp reads the switch once


@pytest.fixture(scope="session")
def starter() -> Path:
    """The starter model; the first test run fetches it."""
    return sources.fetch(load_catalog().get("starter").target.source)


@dataclass(frozen=True)
class PairFiles:
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def pair() -> PairFiles:
    """The reference pair, in the folder that HOMESPEC_TEST_PAIR names."""
    folder = Path(os.environ.get("HOMESPEC_TEST_PAIR") or "/nonexistent")
    files = {part: next(folder.glob(f"*{part}*.gguf"), None) for part in ("1.5b", "0.5b")}
    if None in files.values():
        pytest.skip("HOMESPEC_TEST_PAIR names no folder with the reference pair")
    return PairFiles(files["1.5b"], files["0.5b"])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model that llama.cpp runs in microseconds."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disturbed copy of `tiny`, whose guesses are often right."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "draft.gguf", noise=0.1)


@pytest.fixture(scope="session")
def starter_engine(starter: Path) -> Iterator[Engine]:
    """The starter with settings whose logits do not depend on the width of a pass."""
    params = LoadParams(n_ctx=2048, strict_exact=True)
    with Engine(starter, params=params) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_engine(tiny: Path, tiny_draft: Path) -> Iterator[Engine]:
    """Tiny target and tiny draft."""
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=256, threads=1)) as engine:
        yield engine


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that huggingface_hub takes for the only one, with empty caches."""
    from huggingface_hub import close_session, constants

    with HubServer() as server:
        # The same values that HF_ENDPOINT and the others set; those are read only once a process.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(transfer, "_FIRST_DELAY_SECONDS", 0.01)
        for variable in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        close_session()
        yield server
        close_session()
