"""Prometheus metrics of the daemon and the cluster.

Clients cannot create lasting series: jobs and nodes have series only while they exist, and teams
without a guarantee share the series ``other``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.views import views

OTHER = "other"  # team label for jobs without a team, or of teams without a guarantee
JOB = "job_id"  # label of a job's series, since Prometheus has a `job` of its own
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_METHODS = ("GET", "POST")  # known methods, since a client may send any text
_BYTES_PER_GB = 1e9

Values = Mapping[tuple[str, ...], float]
Row = tuple[str, str, tuple[str, ...], Values]
"""Name, help, labels, and values by the labels' values. Counters' names end with ``_total``."""


class Metrics(Collector):
    """Counters of the daemon. Gauges are made from the state at each scrape."""

    def __init__(self) -> None:
        self._registry = registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "rollmux_requests", "Requests.", ["method", "route", "status"], registry=registry
        )
        self._seconds = prometheus.Histogram(
            "rollmux_request_seconds",
            "Seconds of a request, including waits for permits.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._commit = prometheus.Histogram(
            "rollmux_commit_seconds",
            "Seconds of a transaction.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = prometheus.Histogram(
            "rollmux_commit_entries", "Entries of a transaction.", buckets=_SIZES, registry=registry
        )
        self._rows: list[Row] = []
        registry.register(self)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. ``route`` is its pattern, since client text must not become a label."""
        self._requests.labels(method if method in _METHODS else "", route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def commit(self, entries: int, seconds: float) -> None:
        self._commit.observe(seconds)
        self._batch.observe(entries)

    async def text(self, writer: Writer) -> bytes:
        """The metrics in text format. A daemon that cannot write reports only its own."""
        found = await writer.read(numbers) if writer.alive else None
        self._rows = [*_of_daemon(writer), *(() if found is None else _of_cluster(found))]
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, text, labels, values in self._rows:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            made = kind(f"rollmux_{name}", text, labels=labels)
            for key, value in values.items():
                made.add_metric(key, value)
            yield made


def numbers(core: TransactionLog) -> dict[str, Any]:
    """The data for the gauges."""
    leased = core.leased
    listed = {team.name for team in core.settings.teams}

    def team(name: str) -> str:
        return name if name in listed else OTHER

    states = Counter(
        (leased.state(name), team(record.spec.team)) for name, record in views.unsettled(leased)
    )
    for name, count in leased.gone.items():
        states["ended", team(name)] += count
    found = views.status(core, ended=0)
    jobs = [{**job, "team": team(job["spec"]["team"])} for job in found["jobs"]]
    busy = {node for lease in leased.leases.values() for node in lease.nodes}
    return {
        **found,
        "jobs": jobs,
        "listed": [*sorted(listed), OTHER],
        "states": dict(states),
        "busy": busy,
        "phases": dict(leased.outcomes),
    }


def _of_daemon(writer: Writer) -> Iterator[Row]:
    stats = writer.stats
    for name, text, value in (
        ("store_writable", "0 while the store cannot be written.", float(writer.alive)),
        ("recovery_seconds", "Seconds that reading the log took.", stats.recovery_s),
        ("store_failures_total", "Transactions that failed.", stats.failures),
        ("poisoned_events_total", "Events that the scheduler failed on.", stats.poisoned),
    ):
        yield name, text, (), {(): value}


def _of_cluster(found: Mapping[str, Any]) -> Iterator[Row]:
    slacks = [job["slo_slack_s"] for job in found["jobs"]]
    nearest = "Slack of the live job that is closest to its limit."
    cost = found["cost_per_h"]
    for name, text, value in (
        ("cost_dollars_per_hour", "Cost of the held nodes.", cost["now"]),
        (
            "solo_cost_dollars_per_hour",
            "Cost if every live job had nodes of its own.",
            cost["solo"],
        ),
        ("groups", "Co-execution groups.", len(found["groups"])),
        ("draining", "1 while new jobs are refused.", float(found["draining"])),
        ("entries", "Entries of the log.", found["seq"]),
        ("lease_seconds", "Life of a permit without a heartbeat.", found["lease_s"]),
        ("slo_slack_min_seconds", nearest, min(slacks, default=0.0)),
    ):
        yield name, text, (), {(): value}
    over = {(phase, how): 0.0 for phase in POOL_NAMES for how in ("done", "lost")}
    text = "Ended phases: done, or lost and repeated."
    yield "phases_total", text, ("phase", "outcome"), over | found["phases"]
    yield from _of_jobs(found)
    yield from _of_queue(found)
    yield from _of_teams(found)
    yield from _of_nodes(found)


def _of_jobs(found: Mapping[str, Any]) -> Iterator[Row]:
    jobs, labels = found["jobs"], (JOB, "team")
    known = {("queued", team): 0 for team in found["listed"]}
    text = "Jobs by state, including ended ones."
    yield "jobs", text, ("state", "team"), known | found["states"]
    for name, text, key in (
        ("job_slo_slack_seconds", "Seconds that a live job may still lose.", "slo_slack_s"),
        ("job_slowdown_ratio", "Slowdown of a live job against running alone.", "slowdown"),
        ("job_iterations_done", "Finished iterations of a live job.", "done"),
    ):
        values = {(job["id"], job["team"]): job[key] for job in jobs if job[key] is not None}
        yield name, text, labels, values
    promised = {(job["id"], job["team"]): job["spec"]["slo"] for job in jobs}
    yield (
        "job_slowdown_limit_ratio",
        "Largest slowdown that a live job's SLO allows.",
        labels,
        promised,
    )
    states = {(job["id"], job["team"], job["slo_state"]): 1.0 for job in jobs}
    text = "1 for the state of a live job's SLO: kept, near, behind or missed."
    yield "job_slo_state", text, (*labels, "state"), states


def _of_queue(found: Mapping[str, Any]) -> Iterator[Row]:
    length = dict.fromkeys(((team,) for team in found["listed"]), 0)
    oldest = dict.fromkeys(length, 0.0)
    for job in found["jobs"]:
        if job["queue"] is not None:
            team = (job["team"],)
            length[team] += 1
            oldest[team] = max(oldest[team], found["now"] - job["queue"]["since_s"])
    yield "queue_length", "Jobs that wait for nodes.", ("team",), length
    yield "queue_wait_seconds", "Wait of the job that waits longest.", ("team",), oldest


def _of_teams(found: Mapping[str, Any]) -> Iterator[Row]:
    for kind, text in (
        ("used", "Nodes of a team's jobs. A shared node counts in part."),
        ("guaranteed", "Guaranteed nodes of a team."),
    ):
        values = Counter[tuple[str, ...]]()
        for team in found["teams"]:
            name = team["name"] if team["name"] in found["listed"] else OTHER
            for pool in POOL_NAMES:
                values[name, pool] += team[kind][pool]
        yield f"team_nodes_{kind}", text, ("team", "pool"), values


def _of_nodes(found: Mapping[str, Any]) -> Iterator[Row]:
    nodes = found["nodes"]
    counts = Counter((n["pool"], n["state"], n.get("status", "open")) for n in nodes)
    yield "nodes", "Nodes by pool, state and status.", ("pool", "state", "status"), counts
    up = {pool: [n for n in nodes if n["pool"] == pool and _up(n)] for pool in POOL_NAMES}
    idle = {
        (pool,): sum(n["name"] not in found["busy"] for n in there) / len(there)
        for pool, there in up.items()
        if there
    }
    yield "idle_ratio", "Share of working nodes without a running phase.", ("pool",), idle
    # Rented nodes always get new names, so only owned nodes have series.
    by_name = {(n["name"], n["pool"]): n for n in nodes if "status" in n}
    for name, text, value in (
        ("node_up", "0 while a node counts as failed.", lambda n: float(_up(n))),
        ("node_memory_used_bytes", "Host memory that jobs keep on a node.", _used_bytes),
        ("node_memory_bytes", "Host memory of a node.", lambda n: n["total_gb"] * _BYTES_PER_GB),
        (
            "node_report_age_seconds",
            "Seconds since the last report of a node's agent.",
            lambda n: n["reported_s"],
        ),
    ):
        values = {key: value(n) for key, n in by_name.items()}
        yield name, text, ("node", "pool"), {k: v for k, v in values.items() if v is not None}
    statuses = {(*key, n["status"]): 1.0 for key, n in by_name.items()}
    text = "1 for a node's status: open, cordoned, draining, drained, set_aside or down."
    yield "node_status", text, ("node", "pool", "status"), statuses


def _up(node: Mapping[str, Any]) -> bool:
    return node["state"] not in ("failed", "failing")


def _used_bytes(node: Mapping[str, Any]) -> float:
    return sum(node["memory_gb"].values()) * _BYTES_PER_GB
