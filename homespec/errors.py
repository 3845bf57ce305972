"""Every error homespec raises on purpose, with the exit code the command line gives it.

    HomespecError                 1  it did not work
    ├── UsageError                2  a flag, a value or a file format that cannot be meant
    ├── RefusedError              3  a verdict about a model or a pair
    │   ├── ModelError               this file is no model homespec can run
    │   ├── IncompatiblePairError    the draft does not fit the target's tokenizer
    │   └── PlanError                the pair does not fit this box, and what would
    ├── CannotRunError            4  right request, wrong place or time
    │   ├── OutOfMemoryError         memory or device memory ran short
    │   ├── DiskError                disk full, or not writable
    │   ├── NetworkError             hub not reachable, refused, or wrong answer
    │   │   └── NoRangesError            a server that sends files only whole
    │   └── LibraryError             llama.cpp is missing or does not run here
    └── ContextFullError          1  the prompt does not fit the context

Foreign exceptions are mapped once, where they enter, with `raise ... from exc`.
One place in `cli.py` prints `message` and `hint` on stderr.
"""

from __future__ import annotations


class HomespecError(Exception):
    """A failure told in one plain sentence, with a hint how to go on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(HomespecError):
    """A flag, a value or a file format that cannot be meant."""

    exit_code = 2


class RefusedError(HomespecError):
    """A verdict about a model or a pair."""

    exit_code = 3


class ModelError(RefusedError):
    """This file is no model homespec can run."""


class IncompatiblePairError(RefusedError):
    """The draft does not fit the target's tokenizer."""


class PlanError(RefusedError):
    """The pair does not fit this box."""


class CannotRunError(HomespecError):
    """The request is right, but cannot be served here and now."""

    exit_code = 4


class OutOfMemoryError(CannotRunError):
    """Memory or device memory ran short."""


class DiskError(CannotRunError):
    """The disk is full or not writable."""


class NetworkError(CannotRunError):
    """The hub was not reachable, refused, or gave a wrong answer."""


class NoRangesError(NetworkError):
    """The server sends files only whole, so that none can be looked at before."""


class LibraryError(CannotRunError):
    """llama.cpp is missing, or its build does not run on this machine."""


class ContextFullError(HomespecError):
    """The prompt does not fit the context."""
