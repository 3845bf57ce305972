"""From tokens to shown text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from homespec.decoding.types import TokenId
from homespec.errors import UsageError


class TextStream:
    """Turns committed tokens into text that may be shown, and finds stop strings.

    Text that could be the beginning of a stop string is held back until it is known not to be.
    `text` is all that was released; `num_kept` counts the tokens that lie wholly before the stop
    string (all of them where none was found).
    """

    def __init__(self, piece: Callable[[TokenId], bytes], stops: Sequence[str] = ()) -> None:
        """piece: the bytes of a token. Raises UsageError for an empty stop string."""
        if "" in stops:
            raise UsageError("A stop string must not be empty.")
        self._piece, self._stops = piece, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._token_ends: list[int] = []  # characters of text after each token
        self.text = ""
        self.stopped = False

    @property
    def num_kept(self) -> int:
        """How many tokens the released text covers."""
        if not self.stopped:
            return len(self._token_ends)
        return sum(end <= len(self.text) for end in self._token_ends)

    def push(self, token: TokenId) -> str:
        """The text this token releases; sets `stopped` when it completes a stop string."""
        self._held += self._decoder.decode(self._piece(token))
        # A token that ends inside a character reaches beyond the text decoded so far.
        inside = bool(self._decoder.getstate()[0])
        self._token_ends.append(len(self.text) + len(self._held) + inside)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self._release(len(self._held))
        return self._release(len(self._held) - self._possible_stop())

    def flush(self) -> str:
        """The rest, at the end of the generation."""
        if not self.stopped:
            self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.text += shown
        return shown

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
