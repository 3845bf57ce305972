"""Shown text: whole characters, no part of a stop string, ids cut with the text."""

from __future__ import annotations

import pytest
from homespec.decoding.text import TextStream
from homespec.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st


def stream(pieces: list[bytes], *stops: str) -> tuple[TextStream, list[str]]:
    text = TextStream(lambda token: pieces[token], stops)
    shown = []
    for token in range(len(pieces)):
        shown.append(text.push(token))
        if text.stopped:
            break
    return text, [*shown, text.flush()]


def test_a_stop_string_split_over_tokens_never_leaks() -> None:
    text, shown = stream([b"Hi", b" EN", b"D", b"!"], "END")
    assert shown == ["Hi", " ", "", ""]
    assert (text.text, text.stopped, text.num_kept) == ("Hi ", True, 1)


def test_a_false_start_is_shown_in_the_end() -> None:
    text, shown = stream([b"E", b"N", b"x", b"EN"], "END")
    assert shown == ["", "", "ENx", "", "EN"]
    assert (text.stopped, text.num_kept) == (False, 4)


def test_text_behind_the_stop_in_the_same_token_is_cut() -> None:
    text, _ = stream([b"a", b"b###c"], "###")
    assert (text.text, text.num_kept) == ("ab", 1)


def test_the_first_of_several_stops_counts() -> None:
    text, _ = stream([b"one two three"], "three", "two")
    assert text.text == "one "


def test_a_character_split_over_tokens_comes_whole() -> None:
    raw = "é🙂".encode()
    _, shown = stream([raw[:1], raw[1:3], raw[3:5], raw[5:]])
    assert shown == ["", "é", "", "🙂", ""]


def test_a_broken_character_at_the_end_is_marked() -> None:
    text, shown = stream([b"a", "🙂".encode()[:2]])
    assert shown == ["a", "", "\ufffd"]
    assert text.text == "a\ufffd"


def test_a_token_reaching_into_the_stop_is_not_kept() -> None:
    raw = "x🙂".encode()
    text, _ = stream([raw[:2], raw[2:]], "🙂")
    assert (text.text, text.num_kept) == ("x", 0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError):
        TextStream(lambda token: b"", [""])


@given(
    st.lists(st.binary(max_size=4), max_size=20),
    st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=3),
)
def test_streamed_text_is_the_whole_text_up_to_the_stop(
    pieces: list[bytes], stops: list[str]
) -> None:
    text, shown = stream(pieces, *stops)
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert "".join(shown) == text.text
    assert whole.startswith(text.text)
    assert not any(stop in text.text for stop in stops)
    if not any(stop in whole for stop in stops):
        assert text.text == whole


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=3))
def test_kept_ids_spell_the_kept_text(body: str, stop: str) -> None:
    pieces = [c.encode() for c in body]
    text, _ = stream(pieces, stop)
    assert text.num_kept == len(text.text)
