"""The catalogue: what ships is sound, users' entries join in, mistakes are pointed at."""

from __future__ import annotations

from pathlib import Path

import pytest
from homespec.errors import UsageError
from homespec.models.catalog import Catalog, load_catalog
from homespec.models.references import HubFile, LocalFile, WheelMember


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "homespec"
    folder.mkdir(parents=True)
    return folder


def load(tmp_path: Path, text: str) -> Catalog:
    extra = tmp_path / "extra.yaml"
    extra.write_text(text)
    return load_catalog(extra)


def test_the_shipped_pairs_cover_tiers_and_families() -> None:
    pairs = load_catalog().pairs
    assert len(pairs) >= 20
    assert {pair.min_memory_gb for pair in pairs.values()} >= {2, 4, 8, 16, 24, 48}
    for family in ("smollm2", "qwen2.5-", "qwen2.5-coder", "qwen3", "llama-3", "gemma-3"):
        assert [name for name in pairs if name.startswith(family)], family
    assert {pair.seen for pair in pairs.values()} == {True, False}
    assert all(pair.evidence for pair in pairs.values() if pair.seen)


def test_shipped_files_are_pinned_or_say_main() -> None:
    for file in load_catalog().files.values():
        source = file.source
        assert isinstance(source, HubFile | WheelMember)
        if isinstance(source, HubFile) and source.sha256:
            assert len(source.revision) == 40, file.name
        elif isinstance(source, HubFile):
            assert source.revision == "main", file.name


def test_every_shipped_file_is_used_and_no_draft_is_larger_than_its_target() -> None:
    catalog = load_catalog()
    used = {f.name for p in catalog.pairs.values() for f in (p.target, *p.drafts)}
    assert used == set(catalog.files)
    for pair in catalog.pairs.values():
        for draft in pair.drafts:
            if pair.target.size_bytes and draft.size_bytes:
                assert draft.size_bytes < pair.target.size_bytes, pair.name


def test_the_starter_needs_no_hub_and_no_draft() -> None:
    pair = load_catalog().get("starter")
    assert isinstance(pair.target.source, WheelMember)
    assert pair.draft is None
    assert pair.size_bytes == pair.target.size_bytes


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(UsageError, match="no pair qwen3-8g") as caught:
        load_catalog().get("qwen3-8g")
    assert "qwen3-8b" in str(caught.value.hint)


def test_own_and_extra_files_join_and_replace(tmp_path: Path, own_folder: Path) -> None:
    (own_folder / "models.yaml").write_text(
        "files:\n  mine: {source: ~/m.gguf, licence: own}\n"
        "pairs:\n  mine: {target: mine, drafts: [smollm2-135m-q4_1]}\n"
    )
    catalog = load(tmp_path, "pairs:\n  mine: {target: mine, drafts: ['file:d.gguf'], seen: yes}\n")
    pair = catalog.get("mine")
    assert pair.target.source == LocalFile(Path.home() / "m.gguf")
    assert pair.drafts[0].source == LocalFile(tmp_path / "d.gguf")
    assert pair.seen
    assert "starter" in catalog.pairs
    assert load_catalog().get("mine").draft == catalog.get("starter").target


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing yet\n") == load_catalog()


MISTAKES = {
    "unknown section": ("pairz: {}", 1, "pairz: unknown field", "pairs"),
    "unknown field": (
        "files:\n  f:\n    source: a.gguf\n    size: 3",
        4,
        "files.f.size: unknown",
        "size_bytes",
    ),
    "twice": ("files:\n  f: {source: a}\n  f: {source: b}", 3, "files.f: stands here twice", ""),
    "missing": ("files:\n  f:\n    licence: own", 3, "files.f: source is missing", ""),
    "bad source": ("files:\n  f:\n    source: ftp:x/y", 3, "files.f.source: ", "hf:user/repo"),
    "traversal": ("files:\n  f:\n    source: hf:a/b@main/../../x", 3, "files.f.source: ", ""),
    "bad address": ("files:\n  f:\n    source: 'https://[x/y'", 3, "files.f.source: ", "https:"),
    "nobody": ("files:\n  f:\n    source: ~no-such-user/x", 3, "files.f.source: ", ""),
    "bad sha256": ("files:\n  f:\n    source: a\n    sha256: abc", 4, "files.f.sha256: ", ""),
    "zero size": ("files:\n  f: {source: a, size_bytes: 0}", 2, "files.f.size_bytes: ", ""),
    "text size": ("files:\n  f: {source: a, size_bytes: big}", 2, "files.f.size_bytes: ", ""),
    "unknown file": (
        "pairs:\n  p:\n    target: qwen3-8b-q4_k_n",
        3,
        "pairs.p.target: no file",
        "qwen3-8b-q4_k_m",
    ),
    "unknown draft": (
        "pairs:\n  p:\n    target: 'file:a'\n    drafts:\n    - x",
        5,
        "drafts[0]: ",
        "",
    ),
    "no list": (
        "pairs:\n  p: {target: 'file:a', drafts: x}",
        2,
        "pairs.p.drafts: must be a list",
        "",
    ),
    "hardware": ("pairs:\n  p: {target: 'file:a', hardware: [tpu]}", 2, "hardware[0]: tpu", ""),
    "no truth": ("pairs:\n  p: {target: 'file:a', seen: perhaps}", 2, "pairs.p.seen: ", ""),
    "a list": ("- a\n- b", 1, "must hold names", ""),
    "no YAML": ("files:\n  f: [1,\n", 3, "expected", ""),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_reported_with_file_line_and_field(case: str, tmp_path: Path) -> None:
    text, line, message, hint = MISTAKES[case]
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path / 'extra.yaml'}, line {line}")
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_file_that_cannot_be_read_is_a_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_catalog(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"files: \xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        load_catalog(tmp_path / "latin.yaml")


def test_nested_aliases_do_not_explode(tmp_path: Path) -> None:
    bomb = "files: &a0 {x: y}\n" + "".join(
        f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
    )
    with pytest.raises(UsageError, match="unknown field"):
        load(tmp_path, bomb)


def test_the_catalogue_stands_where_the_wheel_packs_it_from() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    top = Path(__file__).parent.parent
    build = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packed = build["targets"]["wheel"]["force-include"]
    assert packed["models.yaml"] == "homespec/models.yaml"
    assert (top / "models.yaml").is_file()
