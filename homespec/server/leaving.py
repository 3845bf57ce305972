"""Clients that leave before they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class Gone(Exception):
    """The client has left."""


async def gone(request: Request) -> None:
    """Until the client has left; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless(left: asyncio.Future[None], work: Awaitable[T]) -> T:
    """What the work returns; Gone, and the work cancelled, where the client leaves before."""
    task = asyncio.ensure_future(work)
    try:
        both: set[asyncio.Future[Any]] = {task, left}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
