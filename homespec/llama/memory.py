"""Memory of this process."""

from __future__ import annotations

import sys


def peak_memory_bytes() -> int | None:
    """The most memory this process ever held resident; None where the system does not tell."""
    try:
        import resource  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux
