"""All that a brain is, as a record: the same whether it was live or was read from the log."""

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
class BrainState:
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


def state_of(brain: LeasedScheduler) -> BrainState:
    """The state of a brain after its last entry; it shares what it holds with the brain."""
    return BrainState(
        seq=brain.seq,
        now=brain.now,
        jobs=[brain.jobs[name] for name in brain.unsettled_jobs()],
        ended=len(brain.ended),
        leases=[replace(lease, deadline=0.0, beat="") for lease in brain.leases.values()],
        fences=[_saved(fence, brain) for fence in brain.fences],
        agents=list(brain.agents),
        failed=sorted(brain.failed),
        tokens=brain.tokens,
        issued=brain.issued,
        draining=brain.draining,
        timeline=list(brain.timeline),
        running=[lease.stretch() for lease in brain.leases.values()],
        outcomes=[(*kind, count) for kind, count in sorted(brain.outcomes.items())],
        scheduler=brain.scheduler.snapshot(),
        identities={node: who for node in brain.agents if (who := brain.agent(node))},
    )


def _saved(fence: Fence, brain: LeasedScheduler) -> SavedFence:
    """A permit that ran out is out of ``tokens`` before there is an entry of it."""
    tokens = sorted(fence.fenced & brain.leases.keys())
    return SavedFence(tokens=tokens, job=fence.job, node=fence.node)


def encode(state: BrainState) -> str:
    """As JSON."""
    return dumps_finite(state).decode()


def decode(text: str) -> BrainState:
    """The inverse of ``encode``. Raises ``ValueError`` on what is no such state."""
    return load(loads(text), BrainState)


def ended_since(brain: LeasedScheduler, count: int) -> str:
    """As JSON: the jobs that ended, after the first ``count`` of them."""
    return dumps_finite([brain.jobs[name] for name in brain.ended[count:]]).decode()


def ended_jobs(text: str) -> list[JobRecord]:
    """The inverse of ``ended_since``. Raises ``ValueError``."""
    return load(loads(text), list[JobRecord])


def restored(
    state: BrainState, ended: Sequence[JobRecord], settings: Settings, ttl: float
) -> LeasedScheduler:
    """A brain in a state; ``ended`` are the jobs that were settled, in that order."""
    brain = LeasedScheduler(settings, ttl)
    brain.seq, brain.now = state.seq, state.now
    brain.ended = [record.spec.id for record in ended]
    brain.gone.update(record.spec.team for record in ended)
    records = sorted([*state.jobs, *ended], key=lambda record: record.number)
    brain.jobs = {record.spec.id: record for record in records}
    for lease in state.leases:
        brain.leases[lease.token] = replace(lease, deadline=lease.granted + ttl)
    brain.fences = [Fence(set(f.tokens), job=f.job, node=f.node) for f in state.fences]
    brain.agents = dict.fromkeys(state.agents, state.now)
    brain.identities = dict(state.identities)
    brain.failed = set(state.failed)
    brain.tokens = state.tokens
    brain.issued = state.issued
    brain.draining = state.draining
    brain.timeline.extend(state.timeline)
    brain.outcomes.update({(phase, how): count for phase, how, count in state.outcomes})
    for record in state.jobs:
        if (running := record.running) is not None:
            brain.programs.add(record.spec.id, running.left)
    brain.scheduler.restore(state.scheduler)
    return brain
