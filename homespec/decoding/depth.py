"""Draft-depth policies: how many tokens are drafted in the next round."""

from __future__ import annotations

from homespec.decoding.types import Round


class FixedDepth:
    """The same depth every round; 0 is plain decoding."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depth(self) -> int:
        """The draft depth of the next round."""
        return self._depth

    def observe(self, finished: Round) -> None:
        """Nothing to learn."""
