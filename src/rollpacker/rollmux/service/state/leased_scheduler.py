"""The scheduler with its permits as leases, both live and when the log is read again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf

from rollpacker.core.types import Phase
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Fixed, Slot
from rollpacker.rollmux.model.seat import ROLLOUT, TRAIN
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.attempts import ProgramRuns, RunningPrograms
from rollpacker.rollmux.service.state.records import (
    Effects,
    Fence,
    JobRecord,
    JobState,
    Lease,
    NodeStatus,
    PendingMove,
    PhaseOutcome,
    Stretch,
)

TIMELINE = 20_000  # phases on the timeline


class LeasedScheduler:
    """Applies recorded events. It refuses none and never reads a clock.

    ``ttl`` is the life of a lease without a heartbeat, in seconds.
    """

    def __init__(self, settings: Settings, ttl: float) -> None:
        self.scheduler = Scheduler(settings)
        self.ttl = ttl
        self.jobs: dict[str, JobRecord] = {}
        self.ended: list[str] = []
        """Jobs that will not change any more, in the order in which they and their programs ended.
        """
        self.gone: Counter[str] = Counter()  # number of these jobs by team
        self.leases: dict[int, Lease] = {}
        self.fences: list[Fence] = []
        self.agents: dict[str, float] = {}
        self.identities: dict[str, str] = {}  # identities of the agents (empty if unknown)
        self.failed: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.issued = 0
        self.quiet_until = 0.0
        """No permit is granted before this time: permits of a lost history may still be in use."""
        self.draining = False
        self.programs = RunningPrograms()
        self.timeline: deque[Stretch] = deque(maxlen=TIMELINE)
        self.outcomes: Counter[tuple[Phase, str]] = Counter()
        self.touched: set[str] = set()  # jobs whose waiting requests may have an answer now
        self.seq = 0
        self.now = 0.0

    def apply(
        self, seq: int, now: float, event: daemon_events.Recorded, key: str | None
    ) -> Effects:
        self.seq, self.now = seq, now
        effects = Effects()
        if isinstance(event, daemon_events.Note):
            self._note(event)
            return effects
        if isinstance(event, ev.PermitRequested):
            self.jobs[event.job].request = key
            self.touched.add(event.job)
        elif isinstance(event, ev.JobEnded) and event.job in self.scheduler.cluster.jobs:
            self.jobs[event.job].uncounted_s = self.uncounted_s(event.job, now)
        effects.decisions = self.scheduler.handle(now, event)
        if (after := _EVENTS.get(type(event))) is not None:
            after(self, event, effects)
        for decision in effects.decisions:
            if (perform := _DECISIONS.get(type(decision))) is not None:
                perform(self, decision, effects)
        if not self.slots:
            # A rented node that was reserved and is not needed any more goes without an event.
            for node in [node for node in self.agents if not self.needs(node)]:
                self.forget_agent(node)
        return effects

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Named nodes (empty for a cloud)."""
        inventory = self.scheduler.cluster.inventory
        return inventory.slots if isinstance(inventory, Fixed) else {}

    def status(self, node: str) -> NodeStatus:
        """Status of a named node. A draining node is drained when it has no job and no program."""
        slot = self.slots[node]
        on_it = slot.used or self.programs.on(node)
        return "drained" if slot.status == "draining" and not on_it else slot.status

    def begin_epoch(self, seconds: float) -> None:
        """Number permits from the microseconds since the store was made.

        A restored database does not know later permits, but nobody grants a million permits a
        second.
        """
        self.issued = max(self.issued, int(seconds * 1e6))
        self.scheduler.number_from(self.issued)

    def renew(self, now: float) -> None:
        """Give every lease and agent its full time again after the daemon was away."""
        for lease in self.leases.values():
            lease.deadline = max(now, self.quiet_until) + self.ttl
        self.renew_agents(now)

    def renew_agents(self, now: float) -> None:
        """Give agents their full time again, so that frozen programs may continue.

        Holders of permits have stopped by their own clocks.
        """
        for node in self.agents:
            self.agents[node] = now

    def agent(self, node: str) -> str | None:
        """The identity of a node's agent (empty if unknown, None if no agent reports)."""
        return self.identities.get(node, "") if node in self.agents else None

    def forget_agent(self, node: str) -> None:
        self.agents.pop(node, None)
        self.identities.pop(node, None)

    def next_phase(self, job: str) -> Phase | None:
        """The phase that a job must ask for next (None after its last iteration).

        While the job holds a permit, this is the running phase. A process that takes over asks for
        it when the lease has expired.
        """
        live = self.scheduler.cluster.jobs.get(job)
        if live is None or live.over:
            return None
        seat = live.seat
        if live.going or seat is None:
            return "rollout"
        return "rollout" if seat.pool == ROLLOUT else "train"

    def gang(self, job: str) -> tuple[str, ...]:
        """The nodes for a job's program, rollout nodes first. The first node is for its driver.

        Empty if the job has no nodes or must end.
        """
        record, live = self.jobs[job], self.scheduler.cluster.jobs.get(job)
        if live is None or record.ending:
            return ()
        if record.move is not None:
            rollout, train = record.move.decision.rollout, record.move.decision.train
        elif live.home is not None:
            rollout, train = live.home.nodes[ROLLOUT], live.home.nodes[TRAIN]
        else:
            return ()
        everywhere = record.program is not None and record.program.program.members
        return (*rollout, *train) if everywhere else (rollout[0],)

    def lead(self, job: str) -> str | None:
        return next(iter(self.gang(job)), None)

    def needs(self, node: str) -> bool:
        """Whether a rented node is used by a group or by a program."""
        return node in self.scheduler.cluster.nodes or bool(self.programs.on(node))

    def hit_by(self, node: str) -> list[str]:
        """Jobs that lose their state or their nodes when a node fails."""
        held = self.scheduler.cluster.nodes.get(node)
        if held is None:
            return []
        jobs = [self.scheduler.cluster.jobs[name] for name in held.pins]
        return [
            job.spec.id for job in jobs if job.going or job.home is None or node in job.home.names
        ]

    def uncounted_s(self, job: str, now: float) -> float:
        """Seconds of a job's life so far that its SLO does not count."""
        record, live = self.jobs[job], self.scheduler.cluster.jobs.get(job)
        if live is None:
            return record.uncounted_s
        stands = 0.0 if live.stopped_at is None else now - live.stopped_at
        return live.started - record.arrived + stands

    def unsettled_jobs(self) -> list[str]:
        """Jobs that have not ended, or whose programs have not, by arrival."""
        live = {*self.scheduler.cluster.jobs, *self.programs.jobs}
        return sorted(live, key=lambda name: self.jobs[name].number)

    def fails(self, node: str) -> bool:
        """Whether a node failed and the scheduler does not know yet."""
        return any(fence.node == node for fence in self.fences)

    def failing(self, job: str) -> bool:
        live = self.scheduler.cluster.jobs.get(job)
        if live is None or live.home is None:
            return False
        return any(fence.node in live.home.names for fence in self.fences)

    def state(self, job: str) -> JobState:
        record, queued = self.jobs[job], self.scheduler.queue.jobs.get(job)
        flags: tuple[tuple[bool, JobState], ...] = (
            (record.ended is not None, "ended"),
            (record.ending, "ending"),
            (queued is not None and queued.held, "held"),
            (queued is not None, "queued"),
            (self.failing(job), "failing"),
            (record.move is not None, "moving"),
            (record.token is not None, "running"),
            (record.request is not None, "waiting"),
            (True, "idle"),
        )
        return next(name for holds, name in flags if holds)

    def over(self, token: int) -> None:
        """A permit has ended, fenced or not: nobody works under it any more."""
        self.leases[token].deadline = inf
        self._unfence(token)

    def _unfence(self, token: int) -> None:
        for fence in self.fences:
            fence.tokens.discard(token)

    def _arrived(self, event: ev.JobArrived, _: Effects) -> None:
        record = JobRecord(len(self.jobs), event.spec, self.now, by=event.by)
        self.jobs[event.spec.id] = record

    def _changed(self, event: ev.JobChanged, _: Effects) -> None:
        self.jobs[event.job].spec = self.scheduler.cluster.jobs[event.job].spec

    def _finished(self, event: ev.PhaseFinished, effects: Effects) -> None:
        self._close(event.token, "done", effects)
        live = self.scheduler.cluster.jobs[event.job]
        record = self.jobs[event.job]
        record.done, record.solo_s = live.done, live.solo_s

    def _lost(self, event: ev.PermitLost, effects: Effects) -> None:
        self._close(event.token, "lost", effects)

    def _moved(self, event: ev.MoveFinished, _: Effects) -> None:
        self.jobs[event.job].move = None
        self.touched.add(event.job)

    def _failed(self, event: ev.NodeFailed, _: Effects) -> None:
        self.fences = [fence for fence in self.fences if fence.node != event.node]
        self.failed.add(event.node)
        for job in self.programs.on(event.node):
            running = self.jobs[job].running
            if running is None or running.node == event.node:
                self._program_over(job, None, told=True)
                continue
            # The driver may save its work first.
            running.lost = (*running.lost, event.node)
            self.programs.discard(job, [event.node])
        self.forget_agent(event.node)
        self.tokens.pop(event.node, None)

    def _joined(self, event: ev.NodeJoined, _: Effects) -> None:
        self.failed.discard(event.machine.name)

    def _removed(self, event: ev.NodeRemoved, _: Effects) -> None:
        self.forget_agent(event.node)

    def _close(self, token: int, outcome: PhaseOutcome, effects: Effects) -> None:
        self._unfence(token)
        lease = self.leases.pop(token)
        self.jobs[lease.job].token = None
        self.touched.add(lease.job)
        effects.closed.append(lease.stretch(self.now, outcome))
        self.timeline.append(effects.closed[-1])
        self.outcomes[lease.phase, outcome] += 1

    def _permit(self, decision: do.Permit, _: Effects) -> None:
        record = self.jobs[decision.job]
        lease = Lease(
            token=decision.token,
            job=decision.job,
            phase=decision.phase,
            nodes=decision.nodes,
            key=record.request,
            granted=self.now,
            deadline=max(self.now, self.quiet_until) + self.ttl,
            fenced=bool(self.fences) and self.failing(decision.job),
        )
        record.request, record.token = None, lease.token
        self.leases[lease.token] = lease
        self.issued = max(self.issued, lease.token + 1)
        for node in lease.nodes:
            self.tokens[node] = max(lease.token, self.tokens.get(node, -1))
        self.touched.add(lease.job)

    def _move(self, decision: do.Move, effects: Effects) -> None:
        record = self.jobs[decision.job]
        if record.token is not None:
            self._close(record.token, "lost", effects)
        if decision.reason == "failure":
            record.request = None
        record.move = PendingMove(self.seq, decision)
        self.touched.add(decision.job)

    def _wait(self, decision: do.Wait, effects: Effects) -> None:
        """A new job, or one whose nodes failed, waits for nodes."""
        record = self.jobs[decision.job]
        if record.token is not None:
            self._close(record.token, "lost", effects)
        record.request = record.move = None
        self.touched.add(decision.job)

    def _depart(self, decision: do.Depart, effects: Effects) -> None:
        record = self.jobs[decision.job]
        if record.token is not None:
            self._close(record.token, "lost", effects)
        record.ended, record.ending = self.now, False
        if record.program is not None:
            record.program.outcome = record.program.outcome or "stopped"
        self._settle(record)
        record.request = record.move = None
        self.fences = [fence for fence in self.fences if fence.job != decision.job]
        self.touched.add(decision.job)

    def _release_tail(self, decision: do.ReleaseTail, _: Effects) -> None:
        token = self.jobs[decision.job].token
        if token is not None:
            self.leases[token].tail = True

    def _release(self, decision: do.ReleaseNodes, _: Effects) -> None:
        for node in decision.nodes:
            self.tokens.pop(node, None)
            if node not in self.slots and not self.programs.on(node):
                self.forget_agent(node)

    def _note(self, note: daemon_events.Note) -> None:
        match note:
            case daemon_events.DrainSet():
                self.draining = note.draining
            case daemon_events.AgentJoined():
                # A failing node must report again after its failure.
                if not self.fails(note.node):
                    self.agents[note.node] = self.now
                    self.identities[note.node] = note.agent
            case daemon_events.NodeFenced():
                self.forget_agent(note.node)
                self._fence(Fence(set(note.tokens), node=note.node, why=note.why))
            case daemon_events.EndFenced():
                self.jobs[note.job].ending = True
                self.touched.add(note.job)
                self._fence(Fence({note.token}, job=note.job))
            case _:
                self._program_note(note)

    def _program_note(self, note: daemon_events.OfProgram) -> None:
        started = self.jobs[note.job].program
        match note:
            case daemon_events.ProgramGiven():
                self.jobs[note.job].program = ProgramRuns(note.program)
            case daemon_events.AttemptBegun():
                if started is not None:
                    started.begin(note.number, note.node, note.members, self.now)
                    self.programs.add(note.job, (note.node, *note.members))
            case daemon_events.AttemptEnded():
                self._program_over(note.job, note.code, told=note.told)
            case daemon_events.MemberFailed():
                if (running := self.jobs[note.job].running) is not None:
                    running.broken = True

    def _program_over(self, job: str, code: int | None, *, told: bool) -> None:
        record, running = self.jobs[job], self.jobs[job].running
        if record.program is not None and running is not None:
            self.programs.discard(job, running.nodes)
            record.program.end(code, self.now, record.done, told=told)
            self._settle(record)

    def _settle(self, record: JobRecord) -> None:
        """A job that has ended will not change after the end of its program."""
        if record.ended is not None and record.running is None:
            self.ended.append(record.spec.id)
            self.gone[record.spec.team] += 1

    def _fence(self, fence: Fence) -> None:
        for token in fence.tokens:
            self.leases[token].fenced = True
        self.fences.append(fence)


_EVENTS: dict[type, Callable[..., None]] = {
    ev.JobArrived: LeasedScheduler._arrived,
    ev.JobChanged: LeasedScheduler._changed,
    ev.PhaseFinished: LeasedScheduler._finished,
    ev.PermitLost: LeasedScheduler._lost,
    ev.MoveFinished: LeasedScheduler._moved,
    ev.NodeFailed: LeasedScheduler._failed,
    ev.NodeJoined: LeasedScheduler._joined,
    ev.NodeRemoved: LeasedScheduler._removed,
}
_DECISIONS: dict[type, Callable[..., None]] = {
    do.Permit: LeasedScheduler._permit,
    do.Move: LeasedScheduler._move,
    do.Depart: LeasedScheduler._depart,
    do.Wait: LeasedScheduler._wait,
    do.ReleaseTail: LeasedScheduler._release_tail,
    do.ReleaseNodes: LeasedScheduler._release,
}
