"""Tells the reasoning of an answer, between tags such as `<think>`, from what it says."""

from __future__ import annotations

from collections.abc import Iterator

TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}


class ReasoningSplitter:
    """Splits a stream of text; the tags themselves are not shown.

    Reasoning stands at the start of an answer: tags further on are text like any other. Text that
    could be the beginning of a tag is held back until it is known not to be.
    """

    def __init__(self, opened: str = "") -> None:
        """opened: the tag with which the prompt began the reasoning, if it did."""
        self._closing = TAGS.get(opened, "")
        self._held = ""
        self._started = bool(opened)
        self._done = False
        self._trim = True  # blank space next to a tag is not shown

    @property
    def inside(self) -> bool:
        """Whether reasoning has begun and has not ended."""
        return bool(self._closing)

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """The pieces that are certain now, each with whether it is reasoning."""
        self._held += text
        if not self._started:
            yield from self._begin()
        if self._closing:
            yield from self._reason()
        if self._started and not self._closing:
            yield from self._release(len(self._held), False)

    def _begin(self) -> Iterator[tuple[str, bool]]:
        found = self._held.lstrip()
        for opening, closing in TAGS.items():
            if found.startswith(opening):
                self._held, self._closing = found[len(opening) :], closing
                self._started = True
                return
        if found and not any(tag.startswith(found) for tag in TAGS):
            self._started, self._trim = True, False

        yield from ()

    def _reason(self) -> Iterator[tuple[str, bool]]:
        at = self._held.find(self._closing)
        if at >= 0:
            yield from self._release(at, True, last=True)
            self._held = self._held[len(self._closing) :]
            self._closing, self._trim = "", True
            return
        possible = next(
            (
                n
                for n in range(min(len(self._closing) - 1, len(self._held)), 0, -1)
                if self._closing.startswith(self._held[-n:])
            ),
            0,
        )
        # Blank space waits, too: before the closing tag it is not shown.
        certain = len(self._held[: len(self._held) - possible].rstrip())
        yield from self._release(certain, True)

    def _release(
        self, count: int, reasoning: bool, *, last: bool = False
    ) -> Iterator[tuple[str, bool]]:
        text, self._held = self._held[:count], self._held[count:]
        if last:
            text = text.rstrip()
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            yield text, reasoning

    def flush(self) -> Iterator[tuple[str, bool]]:
        """The rest, at the end of the answer."""
        yield from self._release(len(self._held), bool(self._closing))


def whole(text: str, opened: str) -> str:
    """An answer as a message: what the prompt began stands in it, and no reasoning stays open."""
    text = f"{opened}\n{text}" if opened else text
    begun = text.lstrip()
    for opening, closing in TAGS.items():
        if begun.startswith(opening) and closing not in begun:
            return f"{text.rstrip()}\n{closing}\n\n"
    return text


def without_reasoning(text: str) -> str:
    """What an answer says."""
    splitter = ReasoningSplitter()
    pieces = [*splitter.push(text), *splitter.flush()]
    return "".join(piece for piece, reasoning in pieces if not reasoning)
