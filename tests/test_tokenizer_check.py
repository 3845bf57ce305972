"""Which drafts fit a target, and which ids they may not propose."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType
from homespec.errors import HomespecError
from homespec.models.gguf_header import Header, read_header
from homespec.models.gguf_parser import StringArray
from homespec.models.tokenizer_check import (
    MAX_DIFFERING_PIECES,
    MAX_DIFFERING_SHARE,
    Compatibility,
    check_tokenizers,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.clock import fastest
from tests.test_gguf_header import Memory, mutate
from tests.tiny_gguf import tokenizer_metadata, write_tiny_gguf

SIZE = 300
PLAIN = {**tokenizer_metadata(SIZE), "tokenizer.chat_template": "{{ messages }}"}
TOKENS: list[str] = PLAIN["tokenizer.ggml.tokens"]
TYPES: list[int] = PLAIN["tokenizer.ggml.token_type"]


def strings(texts: list[str]) -> StringArray:
    raw = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts)
    return StringArray(raw, len(texts))


def header(**changed: Any) -> Header:
    """A header with the plain tokenizer, or with keys below `tokenizer.ggml` changed or out."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    metadata: dict[str, Any] = {}
    for key, value in {**PLAIN, **changes}.items():
        if isinstance(value, list):
            metadata[key] = strings(value) if isinstance(value[0], str) else np.array(value)
        elif value is not None:
            metadata[key] = value
    return Header("memory", 3, metadata, (), 0, 32, 0, 0)


def outcomes(found: Compatibility) -> dict[str, str]:
    """The tests that did not pass."""
    return {test.name: test.outcome for test in found.tests if test.outcome != "pass"}


def renamed(ids: list[int]) -> list[str]:
    return [f"other {i}" if i in set(ids) else piece for i, piece in enumerate(TOKENS)]


def test_a_model_fits_itself() -> None:
    found = check_tokenizers(header(), header())
    assert found.verdict == "same"
    assert outcomes(found) == {}
    assert (found.forbidden_ids, found.shared_vocabulary) == ((), SIZE)


def test_weights_do_not_matter(tmp_path: Path) -> None:
    one = read_header(write_tiny_gguf(tmp_path / "a.gguf", seed=1))
    other = read_header(write_tiny_gguf(tmp_path / "b.gguf", seed=2, n_layers=3))
    assert check_tokenizers(one, other).verdict == "same"


@pytest.mark.parametrize("padded_is_target", [True, False])
def test_padding_beyond_the_shorter_vocabulary_is_no_difference(padded_is_target: bool) -> None:
    padding = [f"[PAD{i}]" for i in range(SIZE, SIZE + 500)]
    longer = header(
        tokens=TOKENS + padding, token_type=TYPES + [int(TokenType.UNUSED)] * len(padding)
    )
    pair = (longer, header()) if padded_is_target else (header(), longer)
    found = check_tokenizers(*pair)
    assert found.verdict == "same"
    assert (found.forbidden_ids, found.shared_vocabulary) == ((), SIZE)


@pytest.mark.parametrize("longer_is_target", [True, False])
def test_real_pieces_beyond_the_shorter_vocabulary_are_never_a_refusal(
    longer_is_target: bool,
) -> None:
    more = [f"more {i}" for i in range(5 * SIZE)]
    longer = header(tokens=TOKENS + more, token_type=TYPES + [1] * len(more))
    pair = (longer, header()) if longer_is_target else (header(), longer)
    found = check_tokenizers(*pair)
    assert found.verdict == "usable"
    assert outcomes(found) == {"vocabulary size": "difference"}
    assert f"{len(more):,}" in found.reason
    assert (found.forbidden_ids, found.shared_vocabulary) == ((), SIZE)


def test_padding_with_other_names_is_forbidden_but_no_refusal() -> None:
    unused = list(range(256, 290))
    types = [int(TokenType.UNUSED) if i in unused else kind for i, kind in enumerate(TYPES)]
    found = check_tokenizers(header(), header(tokens=renamed(unused), token_type=types))
    assert len(unused) > MAX_DIFFERING_PIECES
    assert found.verdict == "usable"
    assert found.forbidden_ids == tuple(unused)


def test_one_other_piece_is_shown_and_forbidden() -> None:
    found = check_tokenizers(header(), header(tokens=renamed([139])))
    assert found.verdict == "usable"
    assert found.forbidden_ids == (139,)
    assert outcomes(found) == {"pieces": "difference"}
    for shown in ("139", repr(TOKENS[139]), "'other 139'"):
        assert shown in found.reason


def test_a_handful_is_usable_and_more_is_not() -> None:
    handful = list(range(20, 20 + MAX_DIFFERING_PIECES))
    assert check_tokenizers(header(), header(tokens=renamed(handful))).verdict == "usable"
    found = check_tokenizers(header(), header(tokens=renamed([*handful, 200])))
    assert found.verdict == "incompatible"
    assert found.reason == next(test.reason for test in found.tests if test.name == "pieces")


def test_the_share_counts_in_a_large_vocabulary() -> None:
    size = 20_000
    tokens, limit = [f"piece {i}" for i in range(size)], int(size * MAX_DIFFERING_SHARE)
    for count, verdict in ((limit, "usable"), (limit + 1, "incompatible")):
        others = [f"other {i}" if i < count else piece for i, piece in enumerate(tokens)]
        pair = (header(tokens=tokens, token_type=None), header(tokens=others, token_type=None))
        assert check_tokenizers(*pair).verdict == verdict


@given(st.sets(st.integers(0, SIZE - 1), max_size=MAX_DIFFERING_PIECES), st.integers(0, 40))
def test_exactly_the_differing_ids_are_forbidden(ids: set[int], cut: int) -> None:
    size = SIZE - cut
    other = header(tokens=renamed(sorted(ids))[:size], token_type=TYPES[:size])
    found = check_tokenizers(header(), other)
    assert found.verdict != "incompatible"
    assert found.shared_vocabulary == size
    assert found.forbidden_ids == tuple(sorted(i for i in ids if i < size))
    mirrored = check_tokenizers(other, header())
    assert mirrored.forbidden_ids == found.forbidden_ids
    assert outcomes(mirrored) == outcomes(found)


@pytest.mark.parametrize("other", [{"model": "llama"}, {"model": None}, {"tokens": None}])
def test_another_tokenizer_is_incompatible(other: dict[str, Any]) -> None:
    for pair in ((header(), header(**other)), (header(**other), header())):
        found = check_tokenizers(*pair)
        assert found.verdict == "incompatible"
        assert outcomes(found)["tokenizer model"] == "fail"
        assert "tokenizer" in found.reason


MERGES: list[str] = PLAIN["tokenizer.ggml.merges"]
CHANGES = [
    ("pre-tokenizer", "difference", {"pre": "llama-bpe"}),
    ("pre-tokenizer", "difference", {"pre": None}),
    ("merge rules", "difference", {"merges": [MERGES[1], MERGES[0], *MERGES[2:]]}),
    ("merge rules", "difference", {"merges": MERGES[:-1]}),
    ("merge rules", "difference", {"merges": None}),
    ("merge rules", "difference", {"scores": [0.5] * SIZE}),
    ("token types", "difference", {"token_type": [4, *TYPES[1:]]}),
    ("BOS id", "difference", {"bos_token_id": 7}),
    ("EOS id", "difference", {"eos_token_id": 7}),
    ("EOT id", "difference", {"eot_token_id": 7}),
    ("EOT id", "difference", {"eot_token_id": 2**32 - 1}),
    ("EOT id", "note", {"eot_token_id": None}),
    ("adds BOS", "difference", {"add_bos_token": False}),
    ("adds BOS", "note", {"add_bos_token": None}),
    ("adds EOS", "difference", {"add_eos_token": True}),
]


@pytest.mark.parametrize(("name", "outcome", "changed"), CHANGES)
def test_what_costs_speed_at_most_is_usable_without_forbidden_ids(
    name: str, outcome: str, changed: dict[str, Any]
) -> None:
    for pair in ((header(), header(**changed)), (header(**changed), header())):
        found = check_tokenizers(*pair)
        assert outcomes(found) == {name: outcome}
        assert found.verdict == ("same" if outcome == "note" else "usable")
        assert found.forbidden_ids == ()


@pytest.mark.parametrize("template", ["{{ other }}", None])
def test_another_chat_template_is_a_note(template: str | None) -> None:
    other = header()
    metadata = {**other.metadata, "tokenizer.chat_template": template}
    if template is None:
        del metadata["tokenizer.chat_template"]
    found = check_tokenizers(header(), Header("memory", 3, metadata, (), 0, 32, 0, 0))
    assert found.verdict == "same"
    assert outcomes(found) == {"chat template": "note"}


def test_every_reason_is_a_clause_on_one_line() -> None:
    noisy = header(tokens=renamed(list(range(50))), model="x\n\x1b[31m", pre="\n", bos_token_id=1)
    for test in check_tokenizers(header(), noisy).tests:
        assert test.reason.isprintable()
        assert test.reason.strip() == test.reason
        assert not test.reason.endswith(".")


def test_two_large_vocabularies_are_compared_fast() -> None:
    tokens = [f"piece {i}" for i in range(152_000)]
    merges = [f"a {i}" for i in range(151_000)]
    target = header(tokens=tokens, merges=merges, token_type=None)
    draft = header(tokens=[*tokens[:-1], "other"], merges=[*merges[:-1], "b c"], token_type=None)
    assert check_tokenizers(target, draft).forbidden_ids == (151_999,)
    assert fastest(lambda: check_tokenizers(target, draft), within=0.3) < 0.3


@pytest.mark.skipif("HOMESPEC_TEST_PAIR" not in os.environ, reason="no reference pair at hand")
def test_the_reference_pair_fits() -> None:
    paths = sorted(Path(os.environ["HOMESPEC_TEST_PAIR"]).glob("*.gguf"))
    found = check_tokenizers(*(read_header(path) for path in paths[:2]))
    assert found.verdict == "same"
    assert found.forbidden_ids == ()


def test_damaged_headers_are_compared_or_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    data, whole = path.read_bytes(), read_header(path)
    rng, verdicts = random.Random(3), set()
    for _ in range(300):
        with contextlib.suppress(HomespecError):
            damaged = read_header(Memory(mutate(data, whole.data_offset, rng)))
            verdicts.add(check_tokenizers(whole, damaged).verdict)
            verdicts.add(check_tokenizers(damaged, whole).verdict)
    assert len(verdicts) > 1
