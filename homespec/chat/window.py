"""Which messages go to the model when not all fit: the oldest turns are left out, whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from homespec.chat.types import Message
from homespec.errors import ContextFullError

ROOM = 1024  # tokens kept free for an answer, at most a quarter of the context
LEAST_ROOM = 64  # tokens: with less, an answer is not worth beginning


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Where turns begin: a turn is a user's message and what follows up to the next."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def first_that_fits(
    messages: Sequence[Message],
    start: int,
    n_ctx: int,
    count: Callable[[Sequence[Message]], int],
    max_tokens: int | None = None,
) -> int:
    """Index of the oldest message to send; `messages` without the system prompt.

    start: what an earlier turn came to: what was left out once stays out. count: tokens of the
    prompt that some of the messages make, the system prompt included. Where something must go, a
    quarter of the context more goes with it: the prompt changes near its start and has to be read
    anew, and that should not happen at every turn. Raises ContextFullError, with both numbers,
    when the last message alone is too long.
    """
    room = min(ROOM if max_tokens is None else min(max_tokens, ROOM), n_ctx // 4)
    if count(messages[start:]) <= n_ctx - room:
        return start
    starts = [i for i in turn_starts(messages) if i > start]
    for candidate in starts:
        if count(messages[candidate:]) <= n_ctx - room - n_ctx // 4:
            return candidate
    last = starts[-1] if starts else start
    least = min(LEAST_ROOM, room)
    needed = count(messages[last:])
    if needed > n_ctx - least:
        raise ContextFullError(
            f"This message makes a prompt of {needed:,} tokens, but the context holds {n_ctx:,}, "
            f"{least} of them for an answer.",
            hint="Shorten it, or start the chat with a larger context: -c.",
        )
    return last
