"""The model while the server runs: loaded, let go, and loaded again when it is asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from homespec.decoding.stats import clock
from homespec.errors import HomespecError, LibraryError, ModelError
from homespec.llama.chat_template import ChatTemplate
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.service import Service

T = TypeVar("T")
LOADING, READY, LET_GO, FAILED = "loading", "ready", "let go", "failed"


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model and the thread that steps it. template: None for a model without one."""

    engine: ParallelEngine
    service: Service
    template: ChatTemplate | None

    @classmethod
    def of(cls, engine: ParallelEngine) -> Resident:
        """Over an engine, which is closed with it."""
        template = None
        with suppress(ModelError):
            template = ChatTemplate(engine.model, engine.tokenizer)
        return cls(engine, Service(engine.scheduler), template)

    def close(self) -> None:
        """Drop what runs, and free the memory."""
        self.engine.cache.context.abort()  # a pass over a long prompt is not waited for
        self.service.close()
        self.engine.close()


class Host:
    """Keeps one model; used by the event loop's thread alone.

    load: makes the engine; run in a thread. It may be called again after the model was let go.
    name: what to call the model where nobody has named it.
    """

    def __init__(self, load: Callable[[], ParallelEngine], name: str) -> None:
        self._load, self.name = load, name
        self.was_loaded = False
        self._lock = asyncio.Lock()
        self._resident: Resident | None = None
        self._loading: asyncio.Future[Resident] | None = None
        self._num_users = 0
        self._idle_since = clock()
        self.state = LOADING
        self.error: HomespecError | None = None

    @property
    def resident(self) -> Resident | None:
        """The model, while it is loaded."""
        return self._resident

    def count(self, name: str) -> float:
        """A count of the scheduler: num_running or num_waiting."""
        return float(getattr(self._resident.engine.scheduler, name)) if self._resident else 0.0

    def scheduler_stat(self, name: str) -> float:
        """One of SchedulerStats."""
        resident = self._resident
        return float(getattr(resident.engine.scheduler.stats, name)) if resident else 0.0

    @property
    def idle_seconds(self) -> float:
        """For how long nobody has used it."""
        return 0.0 if self._num_users else clock() - self._idle_since

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Resident]:
        """The model, loaded where it is not; it stays as long as it is used.

        Raises what the loading raised.
        """
        self._num_users += 1
        try:
            yield await self._ensure()
        finally:
            self._num_users -= 1
            self._idle_since = clock()

    async def _ensure(self) -> Resident:
        """The model; a loading goes on though nobody waits for it any longer."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._loaded())
            self._loading.add_done_callback(self._ended)
        return await asyncio.shield(self._loading)

    def _ended(self, loading: asyncio.Future[Resident]) -> None:
        self._loading = None
        if not loading.cancelled():
            loading.exception()  # whoever waited has it, and perhaps nobody did

    async def _loaded(self) -> Resident:
        async with self._lock:
            if self._resident is None:
                self.state = LOADING
                try:
                    self._resident = await in_thread(lambda: Resident.of(self._load()))
                except HomespecError as exc:
                    self.state, self.error = FAILED, exc
                    raise
                self.state, self.error, self.was_loaded = READY, None, True
            return self._resident

    async def let_go(self) -> bool:
        """Free its memory; False where it is in use, or not loaded."""
        async with self._lock:
            if self._num_users or self._resident is None:
                return False
            await self._close()
            return True

    async def lighten(self, what: Callable[[ParallelEngine], bool]) -> bool:
        """Have the engine give something up, between two steps; whether it could."""
        async with self._lock:
            resident = self._resident
            if resident is None:
                return False
            return await asyncio.wrap_future(resident.service.call(lambda: what(resident.engine)))

    async def reload(self) -> bool:
        """Load it anew, with all that was given up; False where it is in use."""
        if not await self.let_go():
            return False
        async with self.use():
            return True

    async def close(self) -> None:
        """Free it, in use or not."""
        if self._resident is not None:
            await self._close()

    async def _close(self) -> None:
        resident, self._resident, self.state = self._resident, None, LET_GO
        if resident is not None:
            await in_thread(resident.close)


async def in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_: Callable[[], None]) -> None:
        def tell() -> None:
            if not done.done():
                set_()

        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell)

    def run() -> None:
        try:
            result = work()
        except HomespecError as exc:
            error: HomespecError = exc
        except Exception as exc:
            error = LibraryError(f"The model could not be used: {type(exc).__name__}: {exc}.")
            error.__cause__ = exc
        else:
            settle(lambda: done.set_result(result))
            return
        settle(lambda: done.set_exception(error))

    threading.Thread(target=run, daemon=True).start()
    return await done
