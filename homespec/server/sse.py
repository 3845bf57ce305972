"""Server-sent events, as the OpenAI API sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
PING = ": still here\n\n"
PING_SECONDS = 15.0
"""Silence after which a stream says that it lives: proxies close what is silent for a minute."""


def event(body: dict[str, Any]) -> str:
    """One event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Streamed(StreamingResponse):
    """Events as they come; what they hold is given back whatever becomes of the client."""

    def __init__(self, texts: AsyncIterator[str], held: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(texts, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._held.aclose()
