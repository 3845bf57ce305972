"""Watches a run from a thread: this process's memory, and what else the machine is doing.

What disturbs a measurement: other programs on the processor, a hypervisor that takes it away
(steal), a container's CPU quota, swapping, and a processor that slows down, by heat or by itself.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from homespec.bench.records import Sample
from homespec.decoding.stats import clock

INTERVAL_SECONDS = 0.1
MAX_SAMPLES = 2000

OTHERS_LIMIT = 0.05  # of the machine's processors, in the mean
STEAL_LIMIT = 0.02
SWAP_LIMIT_BYTES = 16 << 20
FREQUENCY_LIMIT = 0.10  # from the fastest to the slowest tenth
SPREAD_LIMIT = 0.15  # of the speed of plain decoding, which hardly hangs on the prompt


@dataclass(frozen=True, slots=True)
class _Clock:
    """Processor seconds so far: of the machine, and of this process."""

    at: float
    busy: float
    steal: float
    own: float

    @classmethod
    def read(cls) -> _Clock:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guests' time is in user's already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        steal = getattr(times, "steal", 0.0)
        own = os.times()
        return cls(clock(), sum(times) - guests - idle - steal, steal, own.user + own.system)


def others_share(before: _Clock, after: _Clock) -> float:
    """The share of all processors that other programs took between two readings."""
    available = (after.at - before.at) * (os.cpu_count() or 1)
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(max(others / available, 0.0), 1.0) if available > 0 else 0.0


class Watch:
    """A thread that looks every tenth of a second while the block runs."""

    def __init__(self, began: float | None = None) -> None:
        self.began = clock() if began is None else began
        self.samples: list[Sample] = []
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._frequencies: list[float] = []
        self._start = _Clock.read()
        self._load_average = _load_average()
        self._counters = _counters()
        self._watched = self._others = 0.0  # seconds of answers, and those that others took

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look_on(self) -> None:
        last, ticks = _Clock.read(), 0
        share = 0.0
        while not self._stop.wait(INTERVAL_SECONDS):
            ticks += 1
            if ticks % 10 == 0:  # the kernel counts in hundredths of a second: shares need one
                now = _Clock.read()
                share, last = others_share(last, now), now
                self._frequencies += _frequency()
            rss = int(self._process.memory_info().rss)
            self.samples.append(Sample(clock() - self.began, rss, share))

    def mark(self) -> _Clock:
        """A point in time, for `since`."""
        return _Clock.read()

    def since(self, mark: _Clock) -> tuple[int, float]:
        """(largest resident memory, share of others) since a mark: of one answer."""
        now = _Clock.read()
        share, seconds = others_share(mark, now), now.at - mark.at
        self._watched += seconds
        self._others += share * seconds
        rss = int(self._process.memory_info().rss)
        seen = [s.rss_bytes for s in self.samples if s.at >= mark.at - self.began]
        return max([rss, *seen]), share

    def environment(self, plain_spread: float | None = None) -> dict[str, Any]:
        """What was seen from begin to end, `disturbances` as sentences.

        others_cpu is of the answers alone: while a server answers, it is no other program.
        plain_spread: how much plain decoding's speed varied, as a share.
        """
        end, counters = _Clock.read(), _counters()
        available = (end.at - self._start.at) * (os.cpu_count() or 1)
        found: dict[str, Any] = {
            "seconds": end.at - self._start.at,
            "load_average_before": self._load_average,
            "load_average_after": _load_average(),
            "others_cpu": self._others / self._watched if self._watched else 0.0,
            "steal": max(end.steal - self._start.steal, 0.0) / available if available else 0.0,
            "frequency_mhz": _spread(self._frequencies),
            "plain_spread": plain_spread,
            **{name: counters[name] - self._counters[name] for name in counters},
        }
        return {**found, "disturbances": disturbances(found)}


def thinned(samples: list[Sample], limit: int = MAX_SAMPLES) -> tuple[Sample, ...]:
    """At most `limit` samples; of neighbours the one with the most memory stays."""
    step = -(-len(samples) // limit) or 1
    groups = (samples[i : i + step] for i in range(0, len(samples), step))
    return tuple(max(group, key=lambda sample: sample.rss_bytes) for group in groups)


def disturbances(found: dict[str, Any]) -> list[str]:
    """What stands against believing the figures, a sentence each."""
    said = []
    if found["others_cpu"] > OTHERS_LIMIT:
        said.append(f"Other programs took {found['others_cpu']:.0%} of the processors.")
    if found["steal"] > STEAL_LIMIT:
        said.append(f"The hypervisor took {found['steal']:.0%} of the processors away (steal).")
    swapped = found.get("swapped_bytes", 0)
    if swapped > SWAP_LIMIT_BYTES:
        said.append(f"The machine swapped {swapped / 2**20:.0f} MiB.")
    if found.get("quota_throttled_seconds", 0) > 0.01 * found["seconds"]:
        said.append("The container's CPU quota stopped this process.")
    if found.get("thermal_throttles", 0) > 0:
        said.append("The processor slowed down because it was too hot.")
    slowest, _, fastest = found["frequency_mhz"] or (0, 0, 0)
    if fastest and slowest < (1 - FREQUENCY_LIMIT) * fastest:
        said.append(f"The processor's frequency went from {fastest:.0f} down to {slowest:.0f} MHz.")
    if (found.get("plain_spread") or 0) > SPREAD_LIMIT:
        said.append(
            f"The machine's own speed varied: plain decoding by {found['plain_spread']:.0%} from "
            "answer to answer."
        )
    return said


def _spread(values: list[float]) -> tuple[float, float, float] | None:
    """(tenth, median, ninth tenth); None of too few."""
    if len(values) < 10:
        return None
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], statistics.median(values), tenths[-1]


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _frequency() -> list[float]:
    """The fastest core's clock in MHz: the others may be asleep. Empty where it is not told."""
    try:
        cores = psutil.cpu_freq(percpu=True)
    except (AttributeError, OSError, NotImplementedError):
        return []
    return [max(core.current for core in cores)] if cores else []


def _counters() -> dict[str, float]:
    """Counters that only grow; those that this system has."""
    readers: dict[str, Callable[[], float | None]] = {
        "swapped_bytes": _swapped_bytes,
        "quota_throttled_seconds": _quota_throttled_seconds,
        "thermal_throttles": _thermal_throttles,
    }
    return {name: value for name, read in readers.items() if (value := read()) is not None}


def _swapped_bytes() -> float | None:
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return None
    return float(swap.sin + swap.sout)


def _quota_throttled_seconds() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            if line.startswith("throttled_usec"):
                return int(line.split()[1]) / 1e6
    return None


def _thermal_throttles() -> float | None:
    counts = []
    for path in Path("/sys/devices/system/cpu").glob(
        "cpu[0-9]*/thermal_throttle/core_throttle_count"
    ):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    return float(sum(counts)) if counts else None
