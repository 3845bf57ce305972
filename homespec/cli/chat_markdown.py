"""Markdown that appears while it is written, by appending alone.

Nothing on the screen is ever drawn over: no resize and no scrolling can garble it, and what has
scrolled away is whole. The block at hand is rendered anew with each word, and what was not there
before is written behind what was.
"""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax

MAX_WIDTH = 100  # columns: longer lines are hard to read
_PAUSE = 0.03  # seconds from one rendering to the next, at least
_SHARE = 10  # and a rendering may take one part in so many of the time
_LONGEST_WORD = 40  # characters: a longer one is shown before it is whole

# No HTML, no definitions of links: both would leave out what the model wrote. No underlined
# headings: what is a paragraph must stay one.
_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["strikethrough", "table"])
    .disable(["reference", "lheading", "html_block", "html_inline"])
)
_LINK = re.compile(r"!?\[[^\]\n]{0,200}(\](\([^)\s]{0,400})?)?$")
_MARKS = re.compile(r"[*_~`\\]+$")
_FENCE = re.compile(r"[ ]{0,3}(`{1,2}|~{1,2}|```.*|~~~.*)$")


class _Code(CodeBlock):
    """A code block as it would stand in a file: no frame, no padding, nothing to copy along."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
        )


class _Heading(Heading):
    """A heading at the left, where the text is."""

    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, markup: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(markup)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":  # a new line of the model's is a new line
                    child.type = "hardbreak"
                elif child.type == "image":
                    child.type, child.tag, child.children = "text", "", None
                    child.content += f" ({child.attrs.get('src', '')})"


class MarkdownStream:
    """Writes Markdown to a console while it comes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._source = ""  # of the blocks that are not finished
        self._shown = ""  # of the block at hand, without blank space
        self._first = True  # no block was begun
        self._next = 0.0  # when to render again

    def push(self, text: str) -> None:
        """More of the text; it must hold no control characters."""
        self._source += text
        began = self._clock()
        if began >= self._next:
            self._render(final=False)
            now = self._clock()
            self._next = now + max(_PAUSE, _SHARE * (now - began))

    def end(self) -> None:
        """Write the rest, and end the line."""
        self._render(final=True)
        if not self._first:
            self._write([Segment("\n")])
        self._source = self._shown = ""
        self._first = True

    def _render(self, final: bool) -> None:
        *finished, rest = _blocks(self._source)
        for block in finished:
            self._block(block)
            self._shown = ""
        self._source = rest
        text = rest if final else _certain(rest)
        if text.strip():
            self._block(text)

    def _block(self, text: str) -> None:
        width = min(self._console.width, MAX_WIDTH)
        options = self._console.options.update(width=width)
        rows = self._console.render_lines(_Markdown(_closed(text)), options, pad=False)
        rows = [_stripped(row) for row in rows]
        while rows and not rows[-1]:
            rows.pop()
        while rows and not rows[0]:
            rows.pop(0)
        if not rows:
            return
        if not self._shown:
            if not self._first:
                self._write([Segment("\n\n")])
            self._first = False
        self._write(list(self._new(rows)))

    def _new(self, rows: list[list[Segment]]) -> Iterator[Segment]:
        """What of the rows is not on the screen yet."""
        skip = _overlap(self._shown, "".join(_solid(s.text) for row in rows for s in row))
        begun = not self._shown  # whether the row at hand is the one the cursor is in
        for row in rows:
            if begun and self._shown:
                yield Segment("\n")
            for segment in row:
                text = segment.text
                if skip:
                    cut = _after(text, skip)
                    skip -= len(_solid(text[:cut]))
                    text = text[cut:]
                    if skip or not text:
                        continue
                self._shown += _solid(text)
                yield Segment(text, segment.style)
            begun = begun or not skip

    def _write(self, segments: list[Segment]) -> None:
        if segments:
            self._console.print(_Segments(segments), end="", soft_wrap=True)


class _Segments:
    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments


def _solid(text: str) -> str:
    return "".join(text.split())


def _stripped(row: list[Segment]) -> list[Segment]:
    """A row without the blank space at its end."""
    row = [segment for segment in row if segment.text and not segment.control]
    while row:
        text = row[-1].text.rstrip()
        if text:
            return [*row[:-1], Segment(text, row[-1].style)]
        row.pop()
    return row


def _after(text: str, count: int) -> int:
    """The index behind `count` characters that are not blank, or the end."""
    for i, character in enumerate(text):
        if not character.isspace():
            if count == 0:
                return i
            count -= 1
            if count == 0:
                return i + 1
    return len(text)


def _overlap(shown: str, text: str) -> int:
    """How many characters of the text are on the screen.

    Where a mark turned out to be none, or the other way round, or rows broke elsewhere and got
    other marks in front, letters and digits are counted: they are the same either way.
    """
    if text.startswith(shown):
        return len(shown)
    wanted = sum(map(str.isalnum, shown))
    at = 0
    while at < len(text) and wanted:
        wanted -= text[at].isalnum()
        at += 1
    tail = re.search(r"[^\w]*$", shown)
    for character in tail.group() if tail else "":
        if text[at : at + 1] == character:
            at += 1
    return at


def _blocks(source: str) -> list[str]:
    """The text of each block; the last may go on."""
    starts = [
        token.map[0]
        for token in _PARSER.parse(source)
        if token.level == 0 and token.map and token.nesting >= 0
    ]
    if len(starts) < 2:
        return [source]
    lines = io.StringIO(source).readlines()  # at \n alone, as the parser counts
    cuts = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]


def _certain(text: str) -> str:
    """A block as far as what follows cannot change how it looks."""
    tokens = _PARSER.parse(text)
    if not tokens:
        return ""
    kind = tokens[0].type
    if kind == "fence":
        line = _last_line(text)
        return text[: len(text) - len(line)] if _FENCE.match(line) else _words(text)
    if kind == "table_open" or "|" in text.splitlines()[0]:
        return ""  # columns are as wide as their widest cell
    text = _words(text)
    # A line that begins so may become a list, a heading, a rule or a fence.
    line = _last_line(text)
    if re.fullmatch(r"[-*+_=~`#>\d.)\s]*", line):
        text = text[: len(text) - len(line)]
    text = _MARKS.sub("", text)
    if found := _LINK.search(text):
        text = text[: found.start()]
    return text


def _last_line(text: str) -> str:
    return text[text.rfind("\n") + 1 :]


def _words(text: str) -> str:
    """Whole words: one that is not finished may still have to go into the next row."""
    end = len(text)
    while end and not text[end - 1].isspace() and cell_len(text[end - 1]) < 2:
        end -= 1
        if len(text) - end > _LONGEST_WORD:
            return text
    return text[:end]


def _closed(text: str) -> str:
    """The text with an end to what is open in it: `**bold` is shown bold before it is closed."""
    inline = [token for token in _PARSER.parse(text) if token.type == "inline"]
    if not inline:
        return text
    content = inline[-1].content
    if not text.rstrip().endswith(content.splitlines()[-1] if content else ""):
        return text
    marks = "".join(reversed(_open_marks(content)))
    return text.rstrip() + marks if marks else text


def _open_marks(content: str) -> list[str]:
    """The marks of emphasis and code that were opened and not closed."""
    marks: list[str] = []
    at = 0
    while at < len(content):
        found = re.match(r"`+|\*{1,3}|_{1,3}|~~|\\.", content[at:], re.DOTALL)
        if not found:
            at += 1
            continue
        mark, before, at = found.group(), content[at - 1 : at], at + found.end()
        after = content[at : at + 1]
        if mark[0] == "\\":
            continue
        if mark[0] == "`":
            end = re.search(rf"(?<!`){mark}(?!`)", content[at:])
            if not end:
                return [mark]
            at += end.end()
        elif marks and marks[-1] == mark and before and not before.isspace():
            marks.pop()
        elif after and not after.isspace() and not (mark[0] == "_" and before.isalnum()):
            marks.append(mark)
    return marks
