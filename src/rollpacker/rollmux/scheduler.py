"""The scheduler: events in, decisions out. The daemon and the simulation drive this one class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rollpacker.core.codec import load, plain
from rollpacker.core.types import Phase
from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.admission import Admission, affordable, expected
from rollpacker.rollmux.cluster import Cluster, Group, Job
from rollpacker.rollmux.jobs import KNOWN_AFTER
from rollpacker.rollmux.moves import Moves
from rollpacker.rollmux.placement import Placement, Site
from rollpacker.rollmux.repack import Repack
from rollpacker.rollmux.seat import IDLE, OUT, ROLLOUT, TRAIN, Seat, State
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.slo_guard import SloGuard
from rollpacker.rollmux.snapshot import Snapshot
from rollpacker.rollmux.waiting import Looks, due, tails_to_release

Choose = Callable[[Job, float], Site]
_POOL: dict[Phase, int] = {"rollout": ROLLOUT, "train": TRAIN}
FEW = 6
"""Groups that an arriving job may try one and all."""


class Scheduler:
    """Places jobs in groups, hands out permits, repacks, guards SLOs.

    Args:
        settings: how.
        choose: where an arriving job goes; None for the cheapest site that keeps all promises.
    """

    def __init__(self, settings: Settings, choose: Choose | None = None) -> None:
        self.settings = settings
        self.cluster = Cluster()
        self.admission = Admission(self.cluster, settings)
        self.placement = Placement(self.cluster, settings, self.admission)
        self._moves = Moves(self.cluster, self.admission)
        self._repack = Repack(self.cluster, settings, self.admission, self.placement, self._moves)
        self._guard = SloGuard(self.cluster, settings)
        self._in_turn = settings.permits == "round_robin"
        self._order = il.round_robin if self._in_turn else il.earliest_deadline
        self._choose = choose or self._cheapest
        self._token = 0
        self._made: list[do.Decision] = []
        self._touched: dict[int, None] = {}
        self._looks = Looks(self._in_turn)

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        """Take one event; the decisions are in the order in which to perform them."""
        self._made = []
        self._touched = {}
        self.admission.refill()
        _HANDLERS[type(event)](self, now, event)
        for number in list(self._touched):
            if (group := self.cluster.groups.get(number)) is not None:
                self._dispatch(group, now)
                self._looks.note(group, now)
        return self._made

    def next_look(self) -> float:
        """When to send ``TimePassed`` if nothing happens; ``seat.NEVER`` for never."""
        return self._looks.next()

    def look_again(self) -> None:
        """Put every group on the list of things to repack."""
        self._repack.everything()

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, as JSON."""
        snapshot = Snapshot(
            jobs=list(self.cluster.jobs.values()),
            groups=list(self.cluster.groups.values()),
            nodes=list(self.cluster.nodes.values()),
            numbers=self.cluster.numbers,
            token=self._token,
            agenda=list(self._repack.agenda),
            rehearsed=list(self.admission.rehearsed.items()),
        )
        return plain(snapshot)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict`` into a new scheduler of the same settings."""
        saved = load(state, Snapshot)
        saved.restore(self.cluster)
        self._token = saved.token
        self._repack.agenda.update(dict.fromkeys(saved.agenda))
        self.admission.rehearsed.update(saved.rehearsed)
        for group in self.cluster.groups.values():
            self._looks.note(group, -1.0)

    def _cheapest(self, job: Job, now: float) -> Site:
        alone = self.placement.alone(job, now)
        few = len(self.cluster.groups) <= FEW
        offer = self.placement.best(job, now, below=alone.cost, thorough=few)
        return (alone if offer is None else offer).site

    def _arrived(self, now: float, event: ev.JobArrived) -> None:
        spec, cap = event.spec, self.settings.memory_cap_gb
        if spec.id in self.cluster.jobs:
            raise ValueError(f"job {spec.id}: there is one of this id already")
        if max(spec.rollout_memory_gb, spec.train_memory_gb) > cap:
            raise ValueError(f"job {spec.id}: needs more host memory than a node's {cap:g} GB")
        job = Job(spec, now, looked_at=now)
        self.cluster.jobs[spec.id] = job
        self._moves.reserve(job, self._choose(job, now))
        home = job.destination
        assert home is not None
        self._acquire(self._moves.acquire(home))
        memory = self._moves.memory(job, home)
        self._moves.arrive(job, now + self.settings.cold_s)
        group = self.cluster.groups[home.group]
        self._made.append(
            do.Place(
                job=spec.id,
                group=group.id,
                epoch=group.epoch + 1,
                rollout=home.nodes[0],
                train=home.nodes[1],
                memory_gb=memory,
            )
        )
        self._rebase(group, now)

    def _acquire(self, nodes: tuple[str, ...]) -> None:
        if nodes:
            self._made.append(do.AcquireNodes(nodes=nodes))

    def _set_aside(self, group: Group, seats: Sequence[Seat], now: float) -> None:
        """Under deadlines an idle member keeps nobody waiting."""
        if self._in_turn and seats:
            for seat in seats:
                seat.set_aside(len(group.seats))
            self._rebase(group, now)

    def _time_passed(self, now: float, _: ev.TimePassed) -> None:
        for number in self._looks.take(now):
            if (group := self.cluster.groups.get(number)) is not None:
                self._touched[number] = None
                self._set_aside(group, group.silent(now), now)
        self._do_repack(now)

    def _requested(self, now: float, event: ev.PermitRequested) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None:
            return
        if job.going:
            job.asked = True
            return
        seat, home = job.seat, job.home
        assert seat is not None
        assert home is not None
        pool = _POOL[event.phase]
        if seat.state not in (IDLE[pool], OUT[pool]):
            return
        back = seat.state is OUT[pool]
        seat.ask()
        self._touched[home.group] = None
        if back:
            self._rebase(self.cluster.groups[home.group], now)

    def _finished(self, now: float, event: ev.PhaseFinished) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or job.token != event.token or job.seat is None or job.home is None:
            return
        job.token = -1
        job.seat.finish(_POOL[event.phase], now, now + self.settings.cold_s)
        self._touched[job.home.group] = None
        if event.phase == "rollout":
            job.rollout_s = event.seconds
            return
        self._iterated(job, job.seat, event.seconds)
        if job.spec.iterations is not None and job.done >= job.spec.iterations:
            self._set_aside(self.cluster.groups[job.home.group], [job.seat], now)
            return
        if job.destination is not None:
            self._begin(job, now, "repack")
        elif self.settings.lifetime and self._guard.must_leave(job, now):
            self._moves.reserve(job, self.placement.isolated(job))
            self._begin(job, now, "guard")
        if job.observed.count == KNOWN_AFTER and job.home is not None:
            self._repack.suggest(job.home.group)
        else:
            self._repack.again(job, now)
        self._do_repack(now)

    def _iterated(self, job: Job, seat: Seat, train_s: float) -> None:
        solo_s = job.rollout_s + train_s
        job.observed.add(job.rollout_s, train_s)
        job.done += 1
        job.solo_s += solo_s
        seat.learn(solo_s, expected(job, self.settings))
        assert job.home is not None
        self.cluster.changed.add(job.home.group)

    def _do_repack(self, now: float) -> None:
        for job in self._repack.work(now):
            seat = job.seat
            if seat is not None and job.token < 0 and seat.state in (State.WAIT_R, State.IDLE_R):
                job.asked = seat.state is State.WAIT_R
                self._begin(job, now, "repack")

    def _begin(self, job: Job, now: float, reason: Literal["repack", "guard", "failure"]) -> None:
        home = job.destination
        assert home is not None
        job.going = True
        if job.seat is not None:
            self._rebase(self._moves.depart(job), now)
        self._acquire(self._moves.acquire(home))
        self._made.append(
            do.Move(
                job=job.spec.id,
                group=home.group,
                epoch=self.cluster.groups[home.group].epoch,
                rollout=home.nodes[0],
                train=home.nodes[1],
                memory_gb=self._moves.memory(job, home),
                reason=reason,
            )
        )

    def _moved(self, now: float, event: ev.MoveFinished) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or not job.going:
            return
        old = job.home
        self._release(self._moves.arrive(job, now + self.settings.cold_s))
        assert job.home is not None
        self._rebase(self.cluster.groups[job.home.group], now)
        if old is not None and old.group in self.cluster.groups:
            self._repack.suggest(old.group)

    def _release(self, nodes: list[str]) -> None:
        if nodes:
            self._made.append(do.ReleaseNodes(nodes=tuple(nodes)))

    def _tail(self, _: float, event: ev.TailReached) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is not None and job.home is not None and job.token >= 0:
            job.tail_reached = True
            self._touched[job.home.group] = None

    def _lost(self, now: float, event: ev.PermitLost) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or job.token != event.token or job.seat is None or job.home is None:
            return
        job.token = -1
        job.seat.lose()
        self._touched[job.home.group] = None
        self._set_aside(self.cluster.groups[job.home.group], [job.seat], now)

    def _ended(self, now: float, event: ev.JobEnded) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None:
            return
        home = job.home or job.destination
        assert home is not None
        group = home.group
        self._forget(job, now)
        del self.cluster.jobs[event.job]
        self._made.append(do.Depart(job=event.job, group=group))
        self._repack.suggest(group)
        self._do_repack(now)

    def _forget(self, job: Job, now: float) -> None:
        """Take a job from all its nodes."""
        for home, seat in ((job.home, job.seat), (job.destination, job.next_seat)):
            if home is None:
                continue
            group = self.cluster.groups[home.group]
            if seat is not None:
                group.seats.remove(seat)
            keep = job.destination if home is job.home else None
            self._release(self.cluster.unpin(job, home, keep=keep))
            if home.group in self.cluster.groups:
                self._rebase(group, now)
        job.home = job.destination = job.seat = job.next_seat = None
        job.token = -1
        job.going = False

    def _failed(self, now: float, event: ev.NodeFailed) -> None:
        node = self.cluster.nodes.get(event.node)
        if node is None:
            return
        node.held = False
        stranded: list[Job] = []
        for job in [self.cluster.jobs[name] for name in list(node.pins)]:
            stays = job.home is None or event.node not in job.home.names
            if job.destination is not None and not job.going and stays:
                self._release(self._moves.cancel(job))
            else:
                self._forget(job, now)
                stranded.append(job)
        # Not before: a group has its dead node as long as anyone is pinned there.
        for job in stranded:
            self._moves.reserve(job, self._choose(job, now))
            job.asked = False
            self._begin(job, now, "failure")

    def _rebase(self, group: Group, now: float) -> None:
        """Rounds count from zero again; who is furthest in its iteration comes first."""
        group.epoch += 1
        self.cluster.changed.add(group.id)
        self._touched[group.id] = None
        seats = group.begin_rounds()
        reserve = (il.load_bound(seats) + self.settings.cold_s) if len(seats) > 1 else 0.0
        for seat in seats:
            slowdown = affordable(self.cluster.jobs[seat.job], now, self.settings, reserve)
            seat.promise(slowdown * (1.0 - self.settings.margin), since=now)
        order = tuple(seat.job for seat in seats)
        self._made.append(do.Rebase(group=group.id, epoch=group.epoch, order=order))

    def _dispatch(self, group: Group, now: float) -> None:
        for pool in (TRAIN, ROLLOUT):
            self._grant(group, pool, now)
        if self.settings.tails and self._release_tails(group):
            self._grant(group, ROLLOUT, now)

    def _grant(self, group: Group, pool: int, now: float) -> None:
        while (seat := self._order(group.seats, pool, now)) is not None:
            job = self.cluster.jobs[seat.job]
            assert job.home is not None
            number = seat.rounds[pool] if self._in_turn else group.next_pass(seat, pool)
            seat.start(pool, now, due(job, seat, pool, now, self.settings))
            job.token = self._token
            job.tail_reached = False
            self._token += 1
            self._made.append(
                do.Permit(
                    job=seat.job,
                    phase="rollout" if pool == ROLLOUT else "train",
                    token=job.token,
                    group=group.id,
                    epoch=group.epoch,
                    round=number,
                    position=seat.position,
                    nodes=job.home.nodes[pool],
                )
            )

    def _release_tails(self, group: Group) -> bool:
        """Nodes of rollouts that are nearly over go to who waits for them."""
        found = tails_to_release(group, self.cluster.jobs, self.settings.lifetime)
        for seat in found:
            home = self.cluster.jobs[seat.job].home
            assert home is not None
            seat.leave_to_tail()
            self._made.append(do.ReleaseTail(job=seat.job, nodes=home.nodes[0]))
        return bool(found)


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.JobArrived: Scheduler._arrived,
    ev.PermitRequested: Scheduler._requested,
    ev.TailReached: Scheduler._tail,
    ev.PhaseFinished: Scheduler._finished,
    ev.PermitLost: Scheduler._lost,
    ev.MoveFinished: Scheduler._moved,
    ev.JobEnded: Scheduler._ended,
    ev.NodeFailed: Scheduler._failed,
    ev.TimePassed: Scheduler._time_passed,
}
