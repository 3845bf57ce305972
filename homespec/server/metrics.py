"""Figures for Prometheus, of one server."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from homespec.decoding.stats import GenerationStats
from homespec.server.host import Host

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DEPTHS = (0, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class Metrics:
    """Counts answers as they end; what changes all the time is read when it is asked for."""

    def __init__(self, host: Host) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"homespec_{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"homespec_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"homespec_{name}", text, buckets=tuple(buckets), registry=registry)

        self.requests = Counter(
            "homespec_requests", "Requests by what became of them.", ["status"], registry=registry
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("prompt_tokens_cached", "Of them, found in the cache.")
        self._tokens = counter("tokens_generated", "Tokens of answers.")
        self._drafted = counter("draft_tokens", "Tokens that were drafted.")
        self._accepted = counter("draft_tokens_accepted", "Of them, accepted.")
        self._draft = counter("draft_seconds", "Seconds of drafting.")
        self._verify = counter("verify_seconds", "Seconds of verifying passes, by answer.")
        self._first = histogram("time_to_first_token_seconds", "From the request on.", _SECONDS)
        self._depth = histogram("draft_depth", "Tokens drafted a round, by answer.", _DEPTHS)
        gauge("requests_running", "Answers being written.").set_function(
            lambda: host.count("num_running")
        )
        gauge("requests_waiting", "Answers that wait for a place.").set_function(
            lambda: host.count("num_waiting")
        )
        gauge("model_loaded", "1 while the model is in memory.").set_function(
            lambda: float(host.resident is not None)
        )
        gauge("memory_resident_bytes", "Memory of the process.").set_function(
            lambda: float(psutil.Process().memory_info().rss)
        )
        gauge("memory_available_bytes", "Memory that this machine has left.").set_function(
            lambda: float(psutil.virtual_memory().available)
        )
        gauge("passes", "Passes since the model was loaded.").set_function(
            lambda: host.scheduler_stat("num_passes")
        )
        gauge("pass_seconds", "Seconds they took.").set_function(
            lambda: host.scheduler_stat("pass_seconds")
        )

    def answered(self, stats: GenerationStats, first_seconds: float) -> None:
        """An answer has ended. first_seconds: from the request to its first token."""
        self._prompt.inc(stats.num_prompt_tokens)
        self._cached.inc(stats.num_cached_tokens)
        self._tokens.inc(stats.num_tokens)
        self._drafted.inc(stats.num_drafted)
        self._accepted.inc(stats.num_accepted)
        self._draft.inc(stats.draft_seconds)
        self._verify.inc(stats.verify_seconds)
        if stats.num_tokens:
            self._first.observe(first_seconds)
        if stats.num_rounds:
            self._depth.observe(stats.num_drafted / stats.num_rounds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
