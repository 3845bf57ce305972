"""The door to Dask, and what can go wrong on the way to its scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from homespec.errors import HomespecError, LibraryError, NetworkError, UsageError

_LOGS = ("distributed", "distributed.client", "distributed.worker", "tornado.application")
NOT_REACHED = (OSError, asyncio.TimeoutError, ValueError, TypeError, RuntimeError)


def load_dask() -> Any:
    """The one door to Dask. Raises LibraryError where it is not installed."""
    try:
        import distributed  # noqa: PLC0415 - an optional extra, and slow to load
    except ImportError as exc:
        raise LibraryError(
            f"Dask distributed cannot be loaded: {exc}.",
            hint="Install the extra: pip install -e '.[cluster]'.",
        ) from exc
    for name in _LOGS:  # they tell every step, with tracebacks; what matters is raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return distributed


def no_scheduler(address: str, exc: Exception) -> HomespecError:
    """What one of NOT_REACHED means, raised when `address` was tried."""
    cause = exc.__cause__ or exc  # Dask wraps what went wrong
    if isinstance(cause, (OSError, asyncio.TimeoutError)):
        return NetworkError(
            f"There is no Dask scheduler at {address}: {cause}.",
            hint="Start one: dask scheduler --port 8786.",
        )
    return _no_address(address, str(cause))


def _no_address(address: str, reason: str) -> UsageError:
    return UsageError(
        f"{address} cannot be used as an address: {reason}.",
        hint="It is like tcp://192.168.1.10:8786; tls:// needs certificates (docs/cluster.md).",
    )


def check_address(distributed: Any, address: str) -> None:
    """Raise UsageError for an address that a client would take, and then hang at its end."""
    try:
        distributed.comm.get_address_host(address)
    except ValueError as exc:
        raise _no_address(address, str(exc)) from exc
    if address.startswith(("tls://", "wss://")):
        settings = distributed.Security().get_connection_args("client")
        if settings.get("ssl_context") is None:
            raise _no_address(address, "no certificates are configured")


@contextmanager
def connected() -> Iterator[None]:
    """Raises NetworkError for whatever Dask raises where it has lost its scheduler."""
    try:
        yield
    except Exception as exc:
        raise scheduler_lost() from exc


def scheduler_lost() -> NetworkError:
    """The error of a scheduler that was there before."""
    return NetworkError(
        "The cluster's scheduler does not answer any more.",
        hint="Start it again, and the workers; then the same command does what is missing.",
    )
