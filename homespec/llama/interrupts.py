"""Ctrl-C within a callback of llama.cpp: ctypes drops what is raised there, here it is kept."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

_AGAIN = 0.05  # seconds until a dropped interrupt is sent again

_pending: list[threading.Timer] = []


def keep_interrupts() -> None:
    """From now on an interrupt that Python can only drop comes again a moment later.

    Signal handlers run between Python's instructions, so mostly at the first one of a callback,
    where no `try` can catch what they raise.
    """
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            before(dropped)
            return
        timer = threading.Timer(_AGAIN, os.kill, [os.getpid(), signal.SIGINT])
        timer.daemon = True
        _pending[:] = [timer]
        timer.start()

    sys.unraisablehook = hook


def take_interrupt() -> bool:
    """Whether an interrupt was dropped and has not come again; it will not, after this."""
    found = False
    while _pending:
        timer = _pending.pop()
        found = timer.is_alive()
        timer.cancel()
    return found
