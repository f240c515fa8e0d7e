"""All that a leased scheduler is, as a record: the same live and read from the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollpacker.core.codec import dumps_finite, load, loads
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import Fence, JobRecord, Lease, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFence:
    """A fence with those of its permits that no entry has ended."""

    tokens: list[int]
    job: str | None
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedState:
    """What entries have led to, and nothing besides.

    Heartbeats are in no entry: leases and agents are without their times, which begin anew at
    every start. Of jobs these are the unsettled ones; the others do not change any more.

    Args:
        ended: how many jobs are settled.
        running: what the leases say too.
        identities: of agents that have told one.
    """

    seq: int
    now: float
    jobs: list[JobRecord]
    ended: int
    leases: list[Lease]
    fences: list[SavedFence]
    agents: list[str]
    failed: list[str]
    tokens: dict[str, int]
    issued: int
    draining: bool
    timeline: list[Stretch]
    running: list[Stretch]
    outcomes: list[tuple[Phase, str, int]]
    scheduler: SchedulerSnapshot
    identities: dict[str, str] = field(default_factory=dict[str, str])


def state_of(leased: LeasedScheduler) -> LeasedState:
    """The state of a scheduler after its last entry; it shares what it holds with it."""
    return LeasedState(
        seq=leased.seq,
        now=leased.now,
        jobs=[leased.jobs[name] for name in leased.unsettled_jobs()],
        ended=len(leased.ended),
        leases=[replace(lease, deadline=0.0, beat="") for lease in leased.leases.values()],
        fences=[_saved(fence, leased) for fence in leased.fences],
        agents=list(leased.agents),
        failed=sorted(leased.failed),
        tokens=leased.tokens,
        issued=leased.issued,
        draining=leased.draining,
        timeline=list(leased.timeline),
        running=[lease.stretch() for lease in leased.leases.values()],
        outcomes=[(*kind, count) for kind, count in sorted(leased.outcomes.items())],
        scheduler=leased.scheduler.snapshot(),
        identities={node: who for node in leased.agents if (who := leased.agent(node))},
    )


def _saved(fence: Fence, leased: LeasedScheduler) -> SavedFence:
    """A permit that ran out is out of ``tokens`` before there is an entry of it."""
    tokens = sorted(fence.fenced & leased.leases.keys())
    return SavedFence(tokens=tokens, job=fence.job, node=fence.node)


def encode(state: LeasedState) -> str:
    """As JSON."""
    return dumps_finite(state).decode()


def decode(text: str) -> LeasedState:
    """The inverse of ``encode``. Raises ``ValueError`` on what is no such state."""
    return load(loads(text), LeasedState)


def ended_since(leased: LeasedScheduler, count: int) -> str:
    """As JSON: the jobs that ended, after the first ``count`` of them."""
    return dumps_finite([leased.jobs[name] for name in leased.ended[count:]]).decode()


def ended_jobs(text: str) -> list[JobRecord]:
    """The inverse of ``ended_since``. Raises ``ValueError``."""
    return load(loads(text), list[JobRecord])


def restored(
    state: LeasedState, ended: Sequence[JobRecord], settings: Settings, ttl: float
) -> LeasedScheduler:
    """A leased scheduler in a state; ``ended`` are the jobs that were settled, in that order."""
    leased = LeasedScheduler(settings, ttl)
    leased.seq, leased.now = state.seq, state.now
    leased.ended = [record.spec.id for record in ended]
    leased.gone.update(record.spec.team for record in ended)
    records = sorted([*state.jobs, *ended], key=lambda record: record.number)
    leased.jobs = {record.spec.id: record for record in records}
    for lease in state.leases:
        leased.leases[lease.token] = replace(lease, deadline=lease.granted + ttl)
    leased.fences = [Fence(set(f.tokens), job=f.job, node=f.node) for f in state.fences]
    leased.agents = dict.fromkeys(state.agents, state.now)
    leased.identities = dict(state.identities)
    leased.failed = set(state.failed)
    leased.tokens = state.tokens
    leased.issued = state.issued
    leased.draining = state.draining
    leased.timeline.extend(state.timeline)
    leased.outcomes.update({(phase, how): count for phase, how, count in state.outcomes})
    for record in state.jobs:
        if (running := record.running) is not None:
            leased.programs.add(record.spec.id, running.left)
    leased.scheduler.restore(state.scheduler)
    return leased
