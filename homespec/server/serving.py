"""The process that listens: its socket, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from homespec.errors import CannotRunError, HomespecError, UsageError
from homespec.server.app import Server
from homespec.server.keys import Keys

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MOST_CONNECTIONS = 256  # each may hold a body in memory
_CLOSING_SECONDS = 5  # for answers that were told to end, to be sent


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, keys: Keys, *, allowed: bool) -> None:
    """Refuse to be open to a network without keys, unless that is said. Raises UsageError."""
    if not is_loopback(host) and not keys and not allowed:
        raise UsageError(
            f"Whoever reaches {host} could use the server: it has no API key.",
            hint="Give --api-key or --api-key-file, or say --no-api-key if that is meant.",
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 for any free one. Raises UsageError and CannotRunError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise UsageError(f"{host!r} is no address of this machine.") from exc
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # What a killed server left half closed does not hinder the next one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise CannotRunError(
            f"Port {port} of {host} cannot be had: {exc.strerror}.", hint="Choose another --port."
        ) from exc
    listener.setblocking(False)
    return listener


class _Process(uvicorn.Server):
    """Ends by signals: the first lets answers end, the second does not wait for them."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self.signal: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises what it caught again in the end, and the exit code is the signal's."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._caught, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    def _caught(self, number: int) -> None:
        if self.should_exit:
            self._server.answering.end_all()
            self.force_exit = number == self.signal == signal.SIGINT
            return
        self.signal, self.should_exit = number, True
        loop = asyncio.get_running_loop()
        loop.call_later(self._server.params.drain, self._server.answering.end_all)


def serve(
    server: Callable[[], Server], listener: socket.socket, ready: Callable[[Server], None]
) -> bool:
    """Serve until a signal; whether it was Ctrl-C. ready: called once the model is loaded.

    Raises what the first loading raised.
    """
    return asyncio.run(_serve(server(), listener, ready))


async def _serve(server: Server, listener: socket.socket, ready: Callable[[Server], None]) -> bool:
    config = uvicorn.Config(
        server.app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",
        ws="none",
        limit_concurrency=_MOST_CONNECTIONS,
        lifespan="on",
        timeout_graceful_shutdown=int(server.params.drain) + _CLOSING_SECONDS,
    )
    process = _Process(config, server)
    failed: list[HomespecError] = []

    async def load() -> None:
        try:
            async with server.host.use() as resident:
                server.answering.admission.parallel = resident.engine.parallel
        except HomespecError as exc:
            failed.append(exc)
            process.should_exit = True
        else:
            ready(server)

    loading = asyncio.ensure_future(load())
    try:
        await process.serve([listener])
    finally:
        loading.cancel()
    if failed:
        raise failed[0]
    return process.signal == signal.SIGINT
