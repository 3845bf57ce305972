"""Signals heard at once: Python runs its handlers between its own instructions only."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_ENDING = (signal.SIGINT, signal.SIGTERM)
_DONE = b"\0"  # no signal has this number


@contextmanager
def told_at_once(heard: Callable[[int], None], note: Callable[[int], None]) -> Iterator[None]:
    """Call `heard` for each Ctrl-C and SIGTERM, in a thread, even within a pass that takes seconds.

    note: called by Python's handler, in the main thread, between two instructions; it may raise.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (byte := os.read(reader, 1)) != _DONE:
            if byte[0] in _ENDING:  # and not the terminal's change of size
                heard(byte[0])

    previous = {number: signal.signal(number, lambda n, _: note(n)) for number in _ENDING}
    descriptor = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.write(writer, _DONE)
        thread.join()
        os.close(reader)
        os.close(writer)


class Abortable(Protocol):
    """Something whose pass can be ended from another thread."""

    def abort(self) -> None:
        """End the pass under way."""
        ...


@contextmanager
def stop_on_signal(context: Abortable) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, and end the pass under way; the list is empty until one comes.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    arrived: list[int] = []

    def note(number: int) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            raise KeyboardInterrupt

    with told_at_once(lambda _: context.abort(), note):
        yield arrived
