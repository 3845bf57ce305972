"""No drafting: plain decoding through the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from homespec.decoding.types import NO_DRAFT, Draft, Round, TokenId


class NoDrafter:
    """Proposes nothing."""

    name = "none"

    def propose(self, committed: Sequence[TokenId], max_tokens: int) -> Draft:
        """An empty draft."""
        return NO_DRAFT

    def observe(self, finished: Round) -> None:
        """Nothing to learn."""
