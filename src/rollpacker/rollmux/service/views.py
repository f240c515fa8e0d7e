"""What people and scripts see of the state: plain dictionaries."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollpacker.core.codec import plain
from rollpacker.rollmux.admission import expected
from rollpacker.rollmux.cluster import Job
from rollpacker.rollmux.inventory import Slot
from rollpacker.rollmux.queue import why_it_waits
from rollpacker.rollmux.seat import ROLLOUT, TRAIN
from rollpacker.rollmux.service.commands import job_record, move_body, permit_body
from rollpacker.rollmux.service.core import Core
from rollpacker.rollmux.service.records import JobRecord, Stretch
from rollpacker.rollmux.teams import Shares

POOLS = ("rollout", "train")
_NEAR = 0.2
"""Iterations at worst that a job's slack should cover."""


def job(core: Core, name: str) -> dict[str, Any]:
    """One job. Raises ``Refused`` where there is none."""
    record = job_record(core, name)
    live = core.brain.scheduler.cluster.jobs.get(name)
    recent = [] if live is None else [list(pair) for pair in live.observed.ring]
    return _job(core, name, record) | {"recent_s": recent}


def _job(core: Core, name: str, record: JobRecord) -> dict[str, Any]:
    brain = core.brain
    live = brain.scheduler.cluster.jobs.get(name)
    home = None if live is None else live.home
    lease = None if record.token is None else brain.leases[record.token]
    return {
        "id": name,
        "number": record.number,
        "state": brain.state(name),
        "spec": plain(record.spec),
        "arrived_s": record.arrived,
        "ended_s": record.ended,
        "elapsed_s": (core.now() if record.ended is None else record.ended) - record.arrived,
        "uncounted_s": brain.uncounted_s(name, core.now()),
        "queue": _queued(core, live),
        "done": record.done,
        "next": brain.next_phase(name),
        "group": None if home is None else home.group,
        "rollout_nodes": [] if home is None else list(home.nodes[ROLLOUT]),
        "train_nodes": [] if home is None else list(home.nodes[TRAIN]),
        "permit": None if lease is None or lease.fenced else permit_body(core, lease),
        "move": None if record.move is None else move_body(record)["move"],
        "program": _program(core, name),
    } | _slo(core, record, live)


def _program(core: Core, name: str) -> dict[str, Any] | None:
    """What agents start, and what became of it; without its environment, which may hold secrets."""
    started = core.brain.programs.jobs.get(name)
    if started is None:
        return None
    told = plain(started)
    del told["program"]["environment"]
    return told | {"lead": core.brain.lead(name), "ready_at": started.ready_at()}


def _slo(core: Core, record: JobRecord, live: Job | None) -> dict[str, Any]:
    """Seconds that a job may still lose without breaking its promise, and how it stands.

    A job of unknown length may stop after any iteration: it banks on the running one only.
    ``slo_state`` is ``missed`` without slack, ``behind`` where only iterations to come can make
    up for what was lost (a daemon that was away, a failed node), ``near`` with little, else
    ``kept``.
    """
    now = core.now() if record.ended is None else record.ended
    elapsed = now - record.arrived - core.brain.uncounted_s(record.spec.id, now)
    to_come = 0 if live is None else live.remaining() if live.spec.iterations else 1
    rest = 0.0 if live is None else to_come * sum(expected(live, core.settings))
    slack = record.spec.slo * (record.solo_s + rest) - elapsed - rest
    slowdown = None if record.solo_s <= 0 else elapsed / record.solo_s
    behind = slowdown is not None and slowdown > record.spec.slo
    near = slack < _NEAR * (record.spec.worst_rollout_s + record.spec.worst_train_s)
    state = "missed" if slack < 0 else "behind" if behind else "near" if near else "kept"
    return {
        "solo_s": record.solo_s,
        "slo_slack_s": slack,
        "slo_state": state,
        "slowdown": slowdown,
    }


def _queued(core: Core, live: Job | None) -> dict[str, Any] | None:
    """Where a job stands in the queue, why, and when it is expected to start."""
    if live is None or live.waits_since is None:
        return None
    order = core.queue()
    expected_s = core.forecast().get(live.spec.id)
    return {
        "position": order.index(live.spec.id) + 1,
        "of": len(order),
        "since_s": live.waits_since,
        "reason": why_it_waits(core.brain.scheduler.cluster, live),
        "starts_in_s": expected_s,
    }


def jobs(core: Core) -> dict[str, Any]:
    """All jobs, those that ended too."""
    return {"jobs": [_job(core, name, record) for name, record in core.brain.jobs.items()]}


def status(core: Core, ended: int = 50) -> dict[str, Any]:
    """The whole cluster, and the last jobs that ended."""
    brain = core.brain
    live = {name: each for name, each in brain.jobs.items() if each.ended is None}
    gone = [(name, each) for name, each in brain.jobs.items() if each.ended is not None]
    gone.sort(key=lambda pair: pair[1].ended or 0.0)
    cluster = brain.scheduler.cluster
    return {
        "now": core.now(),
        "seq": brain.seq,
        "draining": brain.draining,
        "named": core.settings.nodes == "named",
        "lease_s": core.ttl,
        "cost_per_h": cost(core),
        "counts": dict(Counter(brain.state(name) for name in brain.jobs)),
        "nodes": [_node(core, name) for name in brain.slots or cluster.nodes],
        "teams": _teams(core),
        "groups": [
            {
                "id": group.id,
                "epoch": group.epoch,
                "jobs": [seat.job for seat in group.seats],
                "rollout": list(group.nodes[ROLLOUT]),
                "train": list(group.nodes[TRAIN]),
            }
            for group in cluster.groups.values()
        ],
        "memory_cap_gb": core.settings.memory_cap_gb,
        "jobs": [_job(core, name, record) for name, record in live.items()],
        "ended": [_job(core, name, record) for name, record in gone[max(0, len(gone) - ended) :]],
    }


def cost(core: Core) -> dict[str, float]:
    """Dollars per hour: of the nodes that are held, and of every live job alone."""
    prices, brain = core.settings.prices, core.brain
    each = (prices.rollout, prices.train)
    held = sum(each[node.pool] for node in brain.scheduler.cluster.nodes.values() if node.held)
    live = [record.spec for record in brain.jobs.values() if record.ended is None]
    solo = sum(prices.of(spec.gangs) for spec in live)
    return {"now": held, "solo": solo}


def node(core: Core, name: str) -> dict[str, Any]:
    """One node, also one that nobody knows."""
    if name in core.brain.slots or name in core.brain.scheduler.cluster.nodes:
        return _node(core, name)
    state = "failed" if name in core.brain.failed else "unknown"
    return {"name": name, "state": state, "pool": None, "group": None, "memory_gb": {}, "token": -1}


def _node(core: Core, name: str) -> dict[str, Any]:
    brain = core.brain
    found, slot = brain.scheduler.cluster.nodes.get(name), brain.slots.get(name)
    state = "free" if found is None else "held" if found.held else "reserved"
    if any(fence.node == name for fence in brain.fences):
        state = "failing"
    elif found is None and slot is not None and slot.status == "down":
        state = "failed"
    return {
        "name": name,
        "pool": slot.machine.pool if slot else POOLS[found.pool] if found else None,
        "state": state,
        "group": None if found is None else found.group,
        "memory_gb": {} if found is None else dict(found.pins),
        "token": brain.tokens.get(name, -1),
        "agent": name in brain.agents,
    } | (_machine(slot) if slot else {})


def _machine(slot: Slot) -> dict[str, Any]:
    """What only named nodes have."""
    return {"status": slot.status, "why": slot.why, "machine": plain(slot.machine)}


def _teams(core: Core) -> list[dict[str, Any]]:
    """Nodes that each team is guaranteed, and has."""
    shares = Shares(core.brain.scheduler.cluster, core.settings.teams)
    return [
        {
            "name": team.name,
            "guaranteed": dict(zip(POOLS, team.guaranteed, strict=True)),
            "used": dict(zip(POOLS, shares.used(team.name), strict=True)),
        }
        for team in core.settings.teams
    ]


def timeline(core: Core, window_s: float, most: int = 5000) -> dict[str, Any]:
    """Phases of the last seconds, running ones included."""
    since = core.now() - window_s
    found: list[Stretch] = list(core.brain.running.values())
    for stretch in reversed(core.brain.timeline):
        if len(found) >= most or (stretch.end or 0.0) < since:
            break
        found.append(stretch)
    found.sort(key=lambda stretch: stretch.start)
    return {"now": core.now(), "phases": [_stretch(core, each) for each in found]}


def _stretch(core: Core, stretch: Stretch) -> dict[str, Any]:
    return plain(stretch) | {"number": core.brain.jobs[stretch.job].number}
