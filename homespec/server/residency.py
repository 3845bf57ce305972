"""Watches time and memory: what is not needed goes, the cheapest to miss first.

When the machine has less left than the reserve, each look goes a step further: the draft model,
then the cells of ended conversations, then, once nobody is answered, the model itself. It comes
back with the next request, if its plan fits by then. What was given up of a model that stayed
comes back when there has been room for it for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from homespec.decoding.stats import clock
from homespec.errors import HomespecError
from homespec.models.machine import MemoryLimit, read_machine
from homespec.scheduling.engine import ParallelEngine
from homespec.server.host import Host
from homespec.server.settings import ServerParams

logger = logging.getLogger("homespec.server")

WATCH_SECONDS = 1.0
LOOKS = 3  # below the reserve one after another, before something is given up
CALM_SECONDS = 60.0
CALM = 2.0  # times the reserve, before it is taken up again

DRAFT, PREFIXES = "draft", "prefix caches"
_STEPS: tuple[tuple[str, Callable[[ParallelEngine], bool]], ...] = (
    (DRAFT, ParallelEngine.drop_draft),
    (PREFIXES, ParallelEngine.shrink),
)


_UNKNOWN = MemoryLimit("process", 1 << 62, 1 << 62)


def tightest() -> MemoryLimit:
    """The limit of machine or container with the least room."""
    return read_machine().tightest or _UNKNOWN


class Residency:
    """Lets the model go after its time, and gives memory back when the machine runs short.

    memory: tells how much there is, and how much is left.
    """

    def __init__(
        self,
        host: Host,
        params: ServerParams,
        memory: Callable[[], MemoryLimit] = tightest,
    ) -> None:
        self._host, self._params, self._memory = host, params, memory
        self.given_up: list[str] = []
        self._num_low = 0
        self._calm_since: float | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch as long as the block lasts."""
        task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self.look()
            except HomespecError as exc:
                logger.warning("%s", exc.message)
                await self._let_go()

    async def look(self) -> None:
        """One look at clock and memory."""
        host, keep = self._host, self._params.keep_alive
        if keep is not None and host.idle_seconds >= keep and await self._let_go():
            logger.info("The model was let go after %g s without a request.", keep)
        limit, reserve = self._measured()
        self._num_low = self._num_low + 1 if limit.free_bytes < reserve else 0
        if self._num_low >= LOOKS:
            await self._give_up(limit.free_bytes, reserve)
        elif self.given_up:
            await self._take_up(limit.free_bytes, reserve)

    def _measured(self) -> tuple[MemoryLimit, int]:
        """What is left, and the bytes of it that others have."""
        limit, given = self._memory(), self._params.reserve_bytes
        return limit, limit.default_reserve_bytes if given is None else given

    async def _give_up(self, free: int, reserve: int) -> None:
        """The next step that gives something; what it freed shows in the looks to come."""
        self._num_low = 0
        short = f"{free >> 20} of {reserve >> 20} MiB are left"
        for name, step in _STEPS:
            if name not in self.given_up and await self._host.lighten(step):
                self.given_up.append(name)
                logger.warning("Memory is short (%s): the %s went.", short, name)
                return
        if await self._let_go():
            logger.warning("Memory is short (%s): the model was let go.", short)

    async def _let_go(self) -> bool:
        gone = await self._host.let_go()
        if self._host.resident is None:
            self.given_up.clear()  # the next loading plans anew
        return gone

    async def _take_up(self, free: int, reserve: int) -> None:
        if free < CALM * reserve:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = clock()
        if clock() - self._calm_since < CALM_SECONDS or self._host.idle_seconds < WATCH_SECONDS:
            return
        self._calm_since = None
        if await self._host.reload():
            logger.info("There is memory again: the model was loaded anew.")
            self.given_up.clear()

    def told(self) -> dict[str, Any]:
        """For /health."""
        limit, reserve = self._measured()
        return {
            "memory": {
                "available_bytes": limit.free_bytes,
                "reserve_bytes": reserve,
                "short": limit.free_bytes < reserve,
                "given_up": list(self.given_up),
            }
        }
