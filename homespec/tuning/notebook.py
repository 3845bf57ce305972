"""What has been measured so far, on disk, so that an interrupted tuning goes on where it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from homespec.decoding.stats import clock
from homespec.tuning.profile import write_json

Progress = Callable[[str, float], None]
"""Called with what is being measured, and the share of all that is done, 0 to 1."""


class Notebook:
    """Results of stages by name; those of other files, another machine or version are not taken.

    stages: {name: share of the whole}, for progress.
    """

    def __init__(
        self,
        path: Path,
        key: Mapping[str, Any],
        stages: Mapping[str, float],
        progress: Progress | None = None,
    ) -> None:
        self._path, self._key, self._stages = path, dict(key), stages
        self._progress = progress or (lambda *_: None)
        self._doing, self._before, self._began = "", 0.0, 0.0
        try:
            found = json.loads(path.read_text("utf-8"))
            usable = found["key"] == json.loads(json.dumps(self._key))
            self._results: dict[str, Any] = found["results"] if usable else {}
            self._rounds: dict[str, list[dict[str, float]]] = found["rounds"] if usable else {}
            self.seconds: dict[str, float] = found["seconds"] if usable else {}
        except (OSError, ValueError, KeyError, TypeError):
            self._results, self._rounds, self.seconds = {}, {}, {}

    @property
    def resumed(self) -> bool:
        """Whether there is something an earlier run measured."""
        return bool(self._results or self._rounds)

    def stage(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returned (plain values), now or in an earlier run."""
        self._doing, self._began = name, clock()
        self.tell(0.0)
        if name not in self._results:
            try:
                self._results[name] = work()
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + clock() - self._began
                self.save()
        self.tell(1.0)
        self._before += self._stages.get(name, 0.0)
        return self._results[name]

    def rounds(self, name: str) -> list[dict[str, float]]:
        """The rounds of a measurement, to be continued in place and saved."""
        return self._rounds.setdefault(name, [])

    def tell(self, share: float, what: str = "") -> None:
        """Report progress: the share of the present stage that is done."""
        total = self._before + share * self._stages.get(self._doing, 0.0)
        self._progress(what or self._doing, min(1.0, total / sum(self._stages.values())))

    def save(self) -> None:
        """Keep what is there. Raises DiskError."""
        values = {
            "key": self._key,
            "results": self._results,
            "rounds": self._rounds,
            "seconds": self.seconds,
        }
        write_json(self._path, values)

    def discard(self) -> None:
        """All is done: the profile holds it now."""
        with contextlib.suppress(OSError):
            self._path.unlink()
