"""The longest end of a growing text that has stood in it before, found in constant time a token.

A suffix automaton, built online (Blumer et al. 1985, "The smallest automaton recognizing the
subwords of a text"): a state stands for all texts that end at the same places. A state's link leads
to its longest suffix that ends in more places, so the link of the whole text is what is looked for.
`scripts/measure-lookup` compares it with hashes of n-grams: a little more is accepted, for the same
time.
"""

from __future__ import annotations

from homespec.decoding.types import TokenId

_NONE = -1


class SuffixAutomaton:
    """Some hundred bytes and some microseconds for each token, however long the text."""

    def __init__(self, reach: int = 16) -> None:
        """reach: links past which the latest place of a shorter repeat is not brought up to date.

        So a text of one repeated token takes linear time, too.
        """
        self._reach = reach
        self._next: list[dict[TokenId, int]] = [{}]
        self._link, self._length = [_NONE], [0]
        self._end = [0]  # where the token lies that followed the state's texts the last time
        self._last = self._size = 0

    def append(self, token: TokenId) -> None:
        """The text goes on with a token."""
        self._mark()
        self._size += 1
        new = self._add({}, self._length[self._last] + 1, self._size)
        state = self._last
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state == _NONE else self._with_token(state, token)
        self._last = new

    def longest_repeat(self) -> tuple[int, int]:
        """(tokens of the longest end that has stood before, where the token lies that followed it).

        (0, 0) where even the last token is new.
        """
        state = self._link[self._last]
        return (self._length[state], self._end[state]) if state > 0 else (0, 0)

    def _mark(self) -> None:
        """The repeats that end the text so far are about to be followed by a token."""
        state = self._link[self._last]
        for _ in range(self._reach):
            if state <= 0:
                return
            self._end[state] = self._size
            state = self._link[state]

    def _with_token(self, state: int, token: TokenId) -> int:
        """The state of that state's longest text with `token`, apart from longer ones."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        clone = self._add(dict(self._next[found]), self._length[state] + 1, self._end[found])
        self._link[clone], self._link[found] = self._link[found], clone
        while state != _NONE and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, following: dict[TokenId, int], length: int, end: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._end.append(end)
        self._link.append(0)
        return len(self._length) - 1
