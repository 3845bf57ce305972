"""The watch over a run: memory, and what other programs do to it."""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np
import pytest
from homespec.bench.records import Sample
from homespec.bench.watch import Watch, disturbances, thinned

QUIET = {
    "seconds": 60.0,
    "others_cpu": 0.01,
    "steal": 0.0,
    "frequency_mhz": None,
    "swapped_bytes": 0,
    "quota_throttled_seconds": 0.0,
    "thermal_throttles": 0,
    "plain_spread": 0.05,
}


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_quiet_run_is_not_disturbed() -> None:
    assert disturbances(QUIET) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("others_cpu", 0.3, "30%"),
        ("steal", 0.1, "hypervisor"),
        ("swapped_bytes", 100 << 20, "swapped 100 MiB"),
        ("quota_throttled_seconds", 5.0, "quota"),
        ("thermal_throttles", 2, "hot"),
        ("plain_spread", 0.2, "own speed varied"),
        ("frequency_mhz", (1800.0, 2900.0, 3000.0), "3000 down to 1800"),
    ],
)
def test_each_disturbance_is_told(name: str, value: object, said: str) -> None:
    [sentence] = disturbances({**QUIET, name: value})
    assert said in sentence


def test_another_program_is_seen_and_our_own_work_is_not() -> None:
    with Watch() as watch:
        mark = watch.mark()
        spin(1.0)
        _, alone = watch.since(mark)
    with Watch() as watch:
        # as many as there are processors, so that some of it is seen whatever else runs
        others = [
            multiprocessing.Process(target=spin, args=(1.5,)) for _ in range(os.cpu_count() or 1)
        ]
        for other in others:
            other.start()
        mark = watch.mark()
        time.sleep(1.0)
        _, disturbed = watch.since(mark)
        for other in others:
            other.join()
        environment = watch.environment()
    assert disturbed > 0.4
    assert disturbed > alone
    assert any("Other programs" in sentence for sentence in environment["disturbances"])


def test_memory_is_seen_while_it_is_held() -> None:
    size = 100 << 20
    with Watch() as watch:
        mark = watch.mark()
        before, _ = watch.since(mark)
        mark = watch.mark()
        held = np.ones(size, np.uint8)
        time.sleep(0.5)
        del held
        peak, _ = watch.since(mark)
    assert peak >= before + 0.97 * size
    assert len(watch.samples) >= 3


def test_long_runs_are_thinned_and_keep_their_peaks() -> None:
    samples = [Sample(float(i), 10 + (i == 4567), 0.0) for i in range(10_000)]
    few = thinned(samples)
    assert len(few) <= 2000
    assert max(sample.rss_bytes for sample in few) == 11
    assert thinned(samples[:5]) == tuple(samples[:5])
    assert thinned([]) == ()
