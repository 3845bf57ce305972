"""Things that are let go by `close`, or at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

Own = TypeVar("Own", bound="Closing")


class Closing(ABC):
    """Gives a class with `close` the `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Let it go; once is enough, twice does no harm."""

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
