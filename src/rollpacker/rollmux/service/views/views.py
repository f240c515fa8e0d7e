"""The state for users and scripts, as plain dictionaries."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property, partial
from heapq import nlargest
from itertools import islice
from typing import Any

from rollpacker.config.reading import masked_command
from rollpacker.core.codec import plain
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.model.seat import ROLLOUT, TRAIN
from rollpacker.rollmux.placement.admission import expected
from rollpacker.rollmux.scheduler.queue import why_it_waits
from rollpacker.rollmux.scheduler.teams import Shares
from rollpacker.rollmux.service.api import answers
from rollpacker.rollmux.service.commands.commands import job_record, move_body, permit_body
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import JobRecord, JobState, Stretch
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.simulation.forecast import ExpectedStart

_log = logging.getLogger(__name__)
_AT_ONCE = 100  # jobs per step when all are listed, so that heartbeats run in between
_NEAR = 0.2  # share of a worst-case iteration that a job's slack should cover


class QueueView:
    """The queue at one moment, computed once for several jobs. Do not keep it."""

    def __init__(self, core: TransactionLog) -> None:
        self._core = core
        self._reasons: dict[tuple[object, ...], str] = {}

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {job: place for place, job in enumerate(self._core.queue(), 1)}

    @cached_property
    def _forecast(self) -> dict[str, ExpectedStart]:
        return self._core.forecast()

    def of(self, job: Job | None) -> answers.Queued | None:
        """Position, reason and forecast (None for a job that does not wait or is held)."""
        if job is None or job.waits_since is None or job.held:
            return None
        start = self._forecast.get(job.spec.id)
        return {
            "position": self._positions[job.spec.id],
            "of": len(self._positions),
            "since_s": job.waits_since,
            "reason": self._reason(job),
            "starts_in_s": None if start is None else start.middle,
            "starts_between_s": None if start is None else start.between,
        }

    def _reason(self, job: Job) -> str:
        """Cached, since jobs with the same needs wait for the same reason."""
        wanted = _wanted(job)
        if wanted not in self._reasons:
            self._reasons[wanted] = why_it_waits(self._core.leased.scheduler.cluster, job)
        return self._reasons[wanted]


def _wanted(job: Job) -> tuple[object, ...]:
    spec = job.spec
    memory = spec.rollout_memory_gb, spec.train_memory_gb
    labels = tuple(spec.rollout_labels.items()), tuple(spec.train_labels.items())
    return spec.gangs, memory, spec.node_devices, labels, job.programs


def job(core: TransactionLog, name: str) -> answers.JobView:
    """One job."""
    record = job_record(core, name)
    live = core.leased.scheduler.cluster.jobs.get(name)
    recent = [] if live is None else list(live.observed.ring)
    return {**_job(core, name, record, QueueView(core)), "recent_s": recent}


def _jobs(
    core: TransactionLog, records: Iterable[tuple[str, JobRecord]], queue: QueueView
) -> list[answers.JobView]:
    """Several jobs. A job with an error is left out, so that the others are shown."""
    found: list[answers.JobView] = []
    for name, record in records:
        try:
            found.append(_job(core, name, record, queue))
        except Exception:
            _log.exception("job %s cannot be shown", name)
    return found


def _job(core: TransactionLog, name: str, record: JobRecord, queue: QueueView) -> answers.JobView:
    leased = core.leased
    live = leased.scheduler.cluster.jobs.get(name)
    home = None if live is None else live.home
    lease = None if record.token is None else leased.leases[record.token]
    slack, standing, slowdown = _slo(core, record, live)
    return {
        "id": name,
        "number": record.number,
        "state": leased.state(name),
        "spec": plain(record.spec),
        "by": record.by,
        "held": live is not None and live.held,
        "arrived_s": record.arrived,
        "ended_s": record.ended,
        "outcome": record.outcome,
        "elapsed_s": (core.now() if record.ended is None else record.ended) - record.arrived,
        "uncounted_s": leased.uncounted_s(name, core.now()),
        "queue": queue.of(live),
        "done": record.done,
        "next": leased.next_phase(name),
        "group": None if home is None else home.group,
        "rollout_nodes": [] if home is None else list(home.nodes[ROLLOUT]),
        "train_nodes": [] if home is None else list(home.nodes[TRAIN]),
        "permit": None if lease is None or lease.fenced else permit_body(core, lease),
        "move": None if record.move is None else move_body(record)["move"],
        "program": _program(core, record),
        "solo_s": record.solo_s,
        "slo_slack_s": slack,
        "slo_state": standing,
        "slowdown": slowdown,
    }


def _program(core: TransactionLog, record: JobRecord) -> answers.StartedProgram | None:
    """A job's program and attempts, without the environment, which may hold secrets."""
    started = record.program
    if started is None:
        return None
    told = plain(started)
    del told["program"]["environment"]
    for part in ("command", "members"):
        told["program"][part] = masked_command(told["program"][part])
    lead = core.leased.lead(record.spec.id)
    return answers.StartedProgram(**told, lead=lead, ready_at=started.ready_at())


def _slo(
    core: TransactionLog, record: JobRecord, live: Job | None
) -> tuple[float, answers.SloState, float | None]:
    """Seconds that a job may still lose within its SLO, the state of its SLO, and its slowdown.

    A job of unknown length may stop after any iteration. Its slack counts only the running
    iteration, and it misses nothing before its first one ends. Work of the running iteration counts
    as done.

    The state is ``missed`` without slack, ``behind`` if only future iterations can make up for lost
    time (an absent daemon, a failed node), ``near`` with little slack, and ``kept`` otherwise.
    """
    now = core.now() if record.ended is None else record.ended
    elapsed = now - record.arrived - core.leased.uncounted_s(record.spec.id, now)
    rest, worked, left = 0.0, 0.0, None
    if live is not None:
        left = live.spec.left(live.done)
        each = sum(expected(live))
        rest = each * (1 if left is None else max(left, 1))
        worked = min(_worked(core, record, live), each)
    slack = record.spec.slo * (record.solo_s + rest) - elapsed - (rest - worked)
    slowdown = None if record.solo_s <= 0 else elapsed / (record.solo_s + worked)
    over = slack < 0 and (record.solo_s > 0 or left is not None)
    behind = slack < 0 or (slowdown is not None and slowdown > record.spec.slo)
    near = slack < _NEAR * (record.spec.worst_rollout_s + record.spec.worst_train_s)
    state = "missed" if over else "behind" if behind else "near" if near else "kept"
    return slack, state, slowdown


def _worked(core: TransactionLog, record: JobRecord, live: Job) -> float:
    name = record.spec.id
    done = live.rollout_s if core.leased.next_phase(name) == "train" else 0.0
    lease = None if record.token is None else core.leased.leases.get(record.token)
    if lease is None:
        return done
    pool = POOL_NAMES.index(lease.phase)
    return done + min(core.now() - lease.granted, expected(live)[pool])


async def all_jobs(
    read: Callable[[Callable[[TransactionLog], Any]], Awaitable[Any]],
) -> answers.Jobs:
    """All jobs, including ended ones. ``read`` is the writer's."""
    found: list[answers.JobView] = []
    count = await read(lambda core: len(core.leased.jobs))
    for first in range(0, count, _AT_ONCE):
        found += await read(partial(_some_jobs, first=first))
    return {"jobs": found}


def _some_jobs(core: TransactionLog, first: int) -> list[answers.JobView]:
    queue, records = QueueView(core), core.leased.jobs.items()
    some = islice(records, first, first + _AT_ONCE)
    return _jobs(core, some, queue)


def unsettled(leased: LeasedScheduler) -> list[tuple[str, JobRecord]]:
    """Jobs that may still change, by arrival."""
    return [(name, leased.jobs[name]) for name in leased.unsettled_jobs()]


def _last_ended(leased: LeasedScheduler, count: int) -> list[tuple[str, JobRecord]]:
    settled = leased.ended[max(len(leased.ended) - count, 0) :]
    found = [(name, leased.jobs[name]) for name in settled]
    found += [(name, record) for name, record in unsettled(leased) if record.ended is not None]
    return nlargest(count, found, key=lambda pair: pair[1].ended or 0.0)[::-1]


def status(core: TransactionLog, ended: int = 50) -> answers.Status:
    """The whole cluster: pools, queue, teams, groups, jobs."""
    # This view is read often, so jobs that ended long ago are only counted.
    leased = core.leased
    left = unsettled(leased)
    live = {name: record for name, record in left if record.ended is None}
    counts: Counter[JobState] = Counter(leased.state(name) for name, _ in left)
    if leased.ended:
        counts["ended"] += len(leased.ended)
    cluster, queue = leased.scheduler.cluster, QueueView(core)
    return {
        "now": core.now(),
        "seq": leased.seq,
        "draining": leased.draining,
        "named": core.settings.nodes == "named",
        "lease_s": core.ttl,
        "cost_per_h": cost(core),
        "counts": dict(counts),
        "nodes": [_node(core, name) for name in leased.slots or cluster.nodes],
        "teams": teams(core),
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
        "jobs": _jobs(core, live.items(), queue),
        "ended": _jobs(core, _last_ended(leased, ended), queue),
    }


def teams(core: TransactionLog) -> list[answers.TeamView]:
    """Teams with a guarantee, in their order, then others with live jobs, by name.

    ``""`` stands for jobs without a team. The list is empty if there are no teams at all.
    """
    cluster, listed = core.leased.scheduler.cluster, [team.name for team in core.settings.teams]
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in cluster.jobs.values():
        jobs[job.spec.team].append(job)
    names = listed + sorted(jobs.keys() - set(listed))
    if names == [""]:
        return []
    shares = Shares(cluster, core.settings.teams)
    return [_team(name, jobs[name], shares) for name in names]


def _team(name: str, jobs: Iterable[Job], shares: Shares) -> answers.TeamView:
    used, guaranteed = shares.used(name), shares.guaranteed(name)
    borrowed = [max(have - own, 0.0) for have, own in zip(used, guaranteed, strict=True)]
    placed = [job for job in jobs if job.waits_since is None]
    waiting = [job for job in jobs if job.waits_since is not None and not job.held]
    return {
        "name": name,
        "guaranteed": _by_pool(guaranteed),
        "used": _by_pool(used),
        "borrowed": _by_pool(borrowed),
        "share": shares.ratio(name),
        "jobs": {"placed": len(placed), "waiting": len(waiting)},
        "owed": any(shares.entitled([job]) for job in waiting),
        "priority": max((job.spec.priority for job in waiting), default=None),
    }


def _by_pool(values: Iterable[float]) -> dict[Phase, float]:
    return dict(zip(POOL_NAMES, values, strict=True))


def cost(core: TransactionLog) -> answers.Cost:
    """Dollars per hour of the held nodes, and of every live job alone."""
    prices, leased = core.settings.prices, core.leased
    each = (prices.rollout, prices.train)
    held = sum(each[node.pool] for node in leased.scheduler.cluster.nodes.values() if node.held)
    live = [job.spec for job in leased.scheduler.cluster.jobs.values()]
    solo = sum(prices.of(spec.gangs) for spec in live)
    return {"now": held, "solo": solo}


def node(core: TransactionLog, name: str) -> answers.NodeView:
    """One node, even if it is unknown."""
    if name in core.leased.slots or name in core.leased.scheduler.cluster.nodes:
        return _node(core, name)
    return {
        "name": name,
        "pool": None,
        "state": "failed" if name in core.leased.failed else "unknown",
        "group": None,
        "memory_gb": {},
        "total_gb": 0.0,
        "token": -1,
        "agent": False,
        "reported_s": None,
    }


def _node(core: TransactionLog, name: str) -> answers.NodeView:
    leased = core.leased
    found, slot = leased.scheduler.cluster.nodes.get(name), leased.slots.get(name)
    state: answers.NodeState
    state = "free" if found is None else "held" if found.held else "reserved"
    if any(fence.node == name for fence in leased.fences):
        state = "failing"
    elif found is None and slot is not None and slot.status == "down":
        state = "failed"
    told: answers.NodeView = {
        "name": name,
        "pool": slot.machine.pool if slot else POOL_NAMES[found.pool] if found else None,
        "state": state,
        "group": None if found is None else found.group,
        "memory_gb": {} if found is None else dict(found.pins),
        "total_gb": leased.scheduler.cluster.inventory.memory_gb(name),
        "token": leased.tokens.get(name, -1),
        "agent": name in leased.agents,
        "reported_s": max(core.now() - leased.agents[name], 0.0) if name in leased.agents else None,
    }
    if slot is not None:
        machine = plain(slot.machine)
        told.update({"status": leased.status(name), "why": slot.why, "machine": machine})
        told["status_s"] = None if slot.since is None else max(core.now() - slot.since, 0.0)
    return told


def timeline(
    core: TransactionLog, window_s: float, job: str = "", node: str = "", most: int = 5000
) -> answers.Timeline:
    """Phases of the last seconds, optionally of one job or node."""

    def asked_for(stretch: Stretch) -> bool:
        return (not job or stretch.job == job) and (not node or node in stretch.nodes)

    since = core.now() - window_s
    running = [lease.stretch() for lease in core.leased.leases.values()]
    found = [stretch for stretch in running if asked_for(stretch)]
    for stretch in reversed(core.leased.timeline):
        if len(found) >= most or (stretch.end or 0.0) < since:
            break
        if asked_for(stretch):
            found.append(stretch)
    found.sort(key=lambda stretch: stretch.start)
    return {"now": core.now(), "phases": [_stretch(core, each) for each in found]}


def _stretch(core: TransactionLog, stretch: Stretch) -> answers.PhaseRun:
    return {
        "job": stretch.job,
        "number": core.leased.jobs[stretch.job].number,
        "phase": stretch.phase,
        "nodes": list(stretch.nodes),
        "start": stretch.start,
        "end": stretch.end,
        "token": stretch.token,
        "outcome": stretch.outcome,
    }
