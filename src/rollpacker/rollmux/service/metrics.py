"""Numbers for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of the daemon; gauges are set from a status when somebody looks."""

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
        self._gauges = {
            name: Gauge(f"rollmux_{name}", text, registry=registry)
            for name, text in (
                ("cost_dollars_per_hour", "Of the nodes that are held."),
                ("solo_cost_dollars_per_hour", "Of every live job on nodes of its own."),
                ("groups", "Co-execution groups."),
                ("draining", "1 while new jobs are turned away."),
                ("entries", "Entries of the log."),
                ("recovery_seconds", "Seconds that reading the log took."),
                ("store_failures", "Transactions that failed."),
                ("poisoned_events", "Events that the scheduler failed on."),
                ("slo_slack_seconds_min", "Of the live job that is closest to its limit."),
            )
        }
        self._jobs = Gauge("rollmux_jobs", "Jobs by state.", ["state"], registry=registry)
        self._nodes = Gauge(
            "rollmux_nodes", "Nodes by pool and state.", ["pool", "state"], registry=registry
        )

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One more request; ``route`` is its pattern, never what the client wrote."""
        self._requests.labels(method if route else "", route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def commit(self, entries: int, seconds: float) -> None:
        """One more transaction."""
        self._commit.observe(seconds)
        self._batch.observe(entries)

    def text(self, status: dict[str, Any], more: dict[str, float]) -> bytes:
        """In the text format, with gauges of this status."""
        slacks = [job["slo_slack_s"] for job in status["jobs"]]
        values = {
            "cost_dollars_per_hour": status["cost_per_h"]["now"],
            "solo_cost_dollars_per_hour": status["cost_per_h"]["solo"],
            "groups": len(status["groups"]),
            "draining": float(status["draining"]),
            "entries": status["seq"],
            "slo_slack_seconds_min": min(slacks, default=0.0),
        }
        for name, value in (values | more).items():
            self._gauges[name].set(value)
        self._jobs.clear()
        for state, count in status["counts"].items():
            self._jobs.labels(state).set(count)
        self._nodes.clear()
        for node in status["nodes"]:
            self._nodes.labels(node["pool"], node["state"]).inc()
        return generate_latest(self._registry)
