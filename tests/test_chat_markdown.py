"""Markdown that is only appended to: the end is what rendering it at once gives."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Callable

import pytest
from homespec.cli.chat_markdown import MarkdownStream
from rich.console import Console

SAMPLE = """\
# A *heading*

A paragraph with **bold words**, `code_with_underscores`, ~~gone~~ and a
second line; 2 * 3 * 4 stays, as do a_b_c, vector<int>, <b>tags</b> and \\(x\\).

- one
- two with a [link](http://example.invalid/a_b) and ![image](pic.png)
  1. nested **deep
     and wrapped** words that go on and on until the row is full, and further still
  2. more
- three

```python
def f(x):

    return "**not bold**"  # a comment


print(f(1))
```

> a quote that is long enough to be broken into two rows at the least, or so it is hoped
> and goes on

| a | b |
|---|---|
| 1 | a longer cell |

[ref]: http://example.invalid/definition

Setext
---

最後に日本語の文章もある。絵文字 👩‍👩‍👧 と 🇩🇪。 וגם עברית מימין לשמאל. ***All*** of **it
"""


def every_time() -> Callable[[], float]:
    """A clock by which rendering takes no time, and much passes in between."""
    ticks = itertools.count()
    return lambda: float(next(ticks) // 2)


def stream(text: str, cuts: list[int], width: int = 60) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard")
    markdown = MarkdownStream(console, clock=every_time())
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        markdown.push(text[start:end])
    markdown.end()
    return out.getvalue()


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("seed", range(6))
def test_in_pieces_it_is_the_same_as_at_once(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(SAMPLE)), 250 if seed else len(SAMPLE) - 1))
    assert bare(stream(SAMPLE, cuts)) == bare(stream(SAMPLE, []))


def test_nothing_that_was_written_is_left_out() -> None:
    shown = bare(stream(SAMPLE, [], width=200))
    for words in ("<b>tags</b>", "vector<int>", "2 * 3 * 4", "a_b_c", "[ref]: http", "Setext"):
        assert words in shown
    for mark in ("**bold", "~~", "# A", "```"):
        assert mark not in shown


def test_it_only_appends() -> None:
    shown = stream(SAMPLE, list(range(1, len(SAMPLE), 3)))
    assert set(re.findall(r"\x1b\[[0-9;]*(.)", shown)) == {"m"}  # colours; no cursor is moved
    assert "\r" not in shown
    assert "\x1b]" not in shown  # no hidden targets behind links


def test_text_is_shown_before_the_block_is_finished() -> None:
    out = io.StringIO()
    markdown = MarkdownStream(Console(file=out, width=60), clock=every_time())
    markdown.push("This is **very bold and")
    assert out.getvalue() == "This is very bold"
    markdown.push(" more** so")
    assert out.getvalue() == "This is very bold and more"


@pytest.mark.parametrize("width", [25, 90])
def test_a_resize_loses_and_doubles_nothing(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    markdown = MarkdownStream(console, clock=every_time())
    half = SAMPLE.index("nested") + 30
    text = SAMPLE.replace("> ", "")  # a quote's bar stands in each of its rows
    for i, character in enumerate(text[: text.index("| a |")]):
        if i == half:
            console.width = width
        markdown.push(character)
    markdown.end()
    whole = stream(text[: text.index("| a |")], [])
    assert "".join(out.getvalue().split()) == "".join(bare(whole).split())
