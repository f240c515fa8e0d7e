"""Gauges of the cluster as it is now, for Prometheus.

What comes from clients never makes a series of its own for good: jobs and nodes have series while
they are there, and teams without a guarantee are one, ``other``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.views import views

OTHER = "other"
"""Stands for jobs of no team, and of teams that are guaranteed nothing."""
JOB = "job_id"
"""Label of a job's series: Prometheus has a ``job`` of its own."""
_BYTES_PER_GB = 1e9
_CLOSED = ("failed", "failing")

Values = Mapping[tuple[str, ...], float]


def numbers(core: TransactionLog) -> dict[str, Any]:
    """What the gauges are made of: the status, and some that nobody else asks for."""
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


def families(found: Mapping[str, Any]) -> Iterator[Metric]:
    """All gauges, with the counter of phases that only the log knows."""
    yield from _cluster(found)
    yield from _jobs(found)
    yield from _queue(found)
    yield from _teams(found)
    yield from _nodes(found)


def _gauge(name: str, text: str, labels: Iterable[str], values: Values) -> Metric:
    made = GaugeMetricFamily(f"rollmux_{name}", text, labels=list(labels))
    for key, value in values.items():
        made.add_metric(list(key), value)
    return made


def _cluster(found: Mapping[str, Any]) -> Iterator[Metric]:
    cost = found["cost_per_h"]
    slacks = [job["slo_slack_s"] for job in found["jobs"]]
    for name, text, value in (
        ("cost_dollars_per_hour", "Of the nodes that are held.", cost["now"]),
        ("solo_cost_dollars_per_hour", "Of every live job on nodes of its own.", cost["solo"]),
        ("groups", "Co-execution groups.", len(found["groups"])),
        ("draining", "1 while new jobs are turned away.", float(found["draining"])),
        ("entries", "Entries of the log.", found["seq"]),
        ("lease_seconds", "Of a permit without a heartbeat.", found["lease_s"]),
        (
            "slo_slack_min_seconds",
            "Of the live job that is closest to its limit.",
            min(slacks, default=0.0),
        ),
    ):
        yield _gauge(name, text, (), {(): value})
    phases = CounterMetricFamily(
        "rollmux_phases", "Phases that are over: done, or lost and begun again.",
        labels=["phase", "outcome"],
    )  # fmt: skip
    for phase in POOL_NAMES:
        for outcome in ("done", "lost"):
            phases.add_metric([phase, outcome], found["phases"].get((phase, outcome), 0))
    yield phases


def _jobs(found: Mapping[str, Any]) -> Iterator[Metric]:
    jobs, labels = found["jobs"], (JOB, "team")
    known = {("queued", team): 0 for team in found["listed"]}
    text = "Jobs by state, those that ended too."
    yield _gauge("jobs", text, ("state", "team"), known | found["states"])
    for name, text, key in (
        ("job_slo_slack_seconds", "What a live job may still lose.", "slo_slack_s"),
        ("job_slowdown_ratio", "Of a live job against running alone.", "slowdown"),
        ("job_iterations_done", "Iterations of a live job.", "done"),
    ):
        values = {(job["id"], job["team"]): job[key] for job in jobs if job[key] is not None}
        yield _gauge(name, text, labels, values)
    promised = {(job["id"], job["team"]): job["spec"]["slo"] for job in jobs}
    yield _gauge("job_slowdown_limit_ratio", "That a live job was promised.", labels, promised)
    states = {(job["id"], job["team"], job["slo_state"]): 1.0 for job in jobs}
    text = "1 for how a live job's promise stands: kept, near, behind or missed."
    yield _gauge("job_slo_state", text, (*labels, "state"), states)


def _queue(found: Mapping[str, Any]) -> Iterator[Metric]:
    length = dict.fromkeys(((team,) for team in found["listed"]), 0)
    oldest = dict.fromkeys(length, 0.0)
    for job in found["jobs"]:
        if job["queue"] is not None:
            team = (job["team"],)
            length[team] += 1
            oldest[team] = max(oldest[team], found["now"] - job["queue"]["since_s"])
    yield _gauge("queue_length", "Jobs that wait for nodes.", ["team"], length)
    yield _gauge("queue_wait_seconds", "Of the job that waits longest.", ["team"], oldest)


def _teams(found: Mapping[str, Any]) -> Iterator[Metric]:
    for kind, text in (
        ("used", "Nodes that a team's jobs have; a shared one counts in part."),
        ("guaranteed", "Nodes that a team may have whenever it wants."),
    ):
        values = Counter[tuple[str, ...]]()
        for team in found["teams"]:
            name = team["name"] if team["name"] in found["listed"] else OTHER
            for pool in POOL_NAMES:
                values[name, pool] += team[kind][pool]
        yield _gauge(f"team_nodes_{kind}", text, ("team", "pool"), values)


def _nodes(found: Mapping[str, Any]) -> Iterator[Metric]:
    nodes = found["nodes"]
    counts = Counter((n["pool"], n["state"], n.get("status", "open")) for n in nodes)
    text = "Nodes by pool, state and status."
    yield _gauge("nodes", text, ("pool", "state", "status"), counts)
    up = {pool: [n for n in nodes if n["pool"] == pool and _up(n)] for pool in POOL_NAMES}
    idle = {
        (pool,): sum(n["name"] not in found["busy"] for n in there) / len(there)
        for pool, there in up.items()
        if there
    }
    text = "Share of the nodes that are up on which no phase runs now."
    yield _gauge("idle_ratio", text, ["pool"], idle)
    # A cloud's nodes come and go under ever new names: only an owner's have series.
    yield from _by_node([n for n in nodes if "status" in n])


def _by_node(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("node", "pool")
    by_name = {(n["name"], n["pool"]): n for n in nodes}
    for name, text, value in (
        ("node_up", "0 while a node counts as failed.", lambda n: float(_up(n))),
        ("node_memory_used_bytes", "Host memory that jobs keep on a node.", _used_bytes),
        ("node_memory_bytes", "Host memory of a node.", lambda n: n["total_gb"] * _BYTES_PER_GB),
    ):
        yield _gauge(name, text, labels, {key: value(n) for key, n in by_name.items()})
    ages = {k: n["reported_s"] for k, n in by_name.items() if n["reported_s"] is not None}
    yield _gauge("node_report_age_seconds", "Since a node's agent reported.", labels, ages)
    statuses = {(*key, n["status"]): 1.0 for key, n in by_name.items()}
    text = "1 for what a node is: open, cordoned, draining, drained, set_aside or down."
    yield _gauge("node_status", text, (*labels, "status"), statuses)


def _up(node: Mapping[str, Any]) -> bool:
    return node["state"] not in _CLOSED


def _used_bytes(node: Mapping[str, Any]) -> float:
    return sum(node["memory_gb"].values()) * _BYTES_PER_GB
