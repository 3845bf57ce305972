"""The command line: one file a command, flags that several share in `options.py`."""

from homespec.cli.app import main

__all__ = ["main"]
