"""Numbers for Prometheus: what the daemon does, beside how the cluster is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.views.gauges import families, numbers

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


_METHODS = ("GET", "POST")
"""Of routes; a client may write any."""


class Metrics:
    """Counters of the daemon; gauges are made from the state when somebody looks."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rollmux_requests", "Requests.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "rollmux_request_seconds",
            "Seconds of a request, waiting for permits included.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._commit = Histogram(
            "rollmux_commit_seconds",
            "Seconds of a transaction.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = Histogram(
            "rollmux_commit_entries", "Entries of a transaction.", buckets=_SIZES, registry=registry
        )

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One more request; ``route`` is its pattern, and nothing else is what a client wrote."""
        self._requests.labels(method if method in _METHODS else "", route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def commit(self, entries: int, seconds: float) -> None:
        """One more transaction."""
        self._commit.observe(seconds)
        self._batch.observe(entries)

    async def text(self, writer: Writer) -> bytes:
        """In the text format; of a daemon that cannot write, what is known without its state."""
        found = await writer.read(numbers) if writer.alive else None
        now = CollectorRegistry()
        now.register(_Now(writer, found))
        return generate_latest(self._registry) + generate_latest(now)


class _Now(Collector):
    """Gauges of one moment."""

    def __init__(self, writer: Writer, found: Mapping[str, Any] | None) -> None:
        self._writer = writer
        self._found = found

    def collect(self) -> Iterator[Metric]:
        """Of the daemon, then of the cluster."""
        stats = self._writer.stats
        for name, text, value in (
            ("store_writable", "0 while the store cannot be written.", float(self._writer.alive)),
            ("recovery_seconds", "Seconds that reading the log took.", stats.recovery_s),
        ):
            yield GaugeMetricFamily(f"rollmux_{name}", text, value)
        for name, text, value in (
            ("store_failures", "Transactions that failed.", stats.failures),
            ("poisoned_events", "Events that the scheduler failed on.", stats.poisoned),
        ):
            yield CounterMetricFamily(f"rollmux_{name}", text, value)
        if self._found is not None:
            yield from families(self._found)
