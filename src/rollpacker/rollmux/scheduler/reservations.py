"""Reservations and moves: reserve at the destination, switch between iterations, then let go."""

from __future__ import annotations

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Home, Job
from rollpacker.rollmux.model.seat import POOLS
from rollpacker.rollmux.placement.admission import Admission
from rollpacker.rollmux.placement.placement import Site


class Reservations:
    """The only place where jobs reserve, get and leave homes."""

    def __init__(self, cluster: Cluster, admission: Admission) -> None:
        self._cluster = cluster
        self._admission = admission

    def reserve(self, job: Job, site: Site) -> None:
        """Take memory and a seat at the destination. The job stays at its home for now."""
        assert job.destination is None
        group = (
            self._cluster.new_group() if site.group is None else self._cluster.groups[site.group]
        )
        nodes = [
            site.nodes[pool]
            + self._cluster.new_nodes(group, pool, site.fresh[pool], job.needs(pool))
            for pool in POOLS
        ]
        home = Home(group.id, (nodes[0], nodes[1]))
        self._cluster.pin(job, home)
        seat = self._admission.seat(job, (group.mask(nodes[0]), group.mask(nodes[1])))
        seat.reserve(job.seat.target if job.seat else job.spec.slo)
        group.seats.append(seat)
        job.destination, job.next_seat = home, seat

    def cancel(self, job: Job) -> list[str]:
        """Undo a reservation before its move began. In reverse order this restores every number.

        Returns nodes to give back, if their other jobs have left since.
        """
        home, seat = job.destination, job.next_seat
        assert home is not None
        assert seat is not None
        assert not job.going
        group = self._cluster.groups[home.group]
        group.seats.remove(seat)
        fresh = self._fresh(home)
        freed = self._cluster.unpin(job, home, keep=job.home)
        self._give_back_numbers(fresh, group)
        job.destination = job.next_seat = None
        return freed

    def _give_back_numbers(self, names: list[str], group: CoExecutionGroup) -> None:
        cluster = self._cluster
        cluster.inventory.untake(name for name in names if name not in cluster.nodes)
        # Other jobs have used the group, so its number and epochs must not be used again.
        new = group.id == cluster.number - 1 and not group.epoch
        if new and group.id not in cluster.groups:
            cluster.number -= 1

    def _fresh(self, home: Home) -> list[str]:
        return [name for name in home.names if not self._cluster.nodes[name].held]

    def acquire(self, home: Home) -> list[do.Decision]:
        """Ask the provider for new nodes of a home."""
        fresh = self._fresh(home)
        for name in fresh:
            self._cluster.nodes[name].held = True
        return [do.AcquireNodes(nodes=tuple(fresh))] if fresh else []

    def memory(self, job: Job, home: Home) -> dict[str, float]:
        return {name: self._cluster.nodes[name].pins[job.spec.id] for name in home.names}

    def take(self, job: Job, asks_by: float) -> list[do.Decision]:
        """A new job takes its reserved nodes (``asks_by`` as in ``arrive``)."""
        home = job.destination
        assert home is not None
        acquired, memory = self.acquire(home), self.memory(job, home)
        self.arrive(job, asks_by)
        placed = do.Place(
            job=job.spec.id,
            group=home.group,
            epoch=self._cluster.groups[home.group].epoch + 1,
            rollout=home.nodes[0],
            train=home.nodes[1],
            memory_gb=memory,
        )
        return [*acquired, placed]

    def depart(self, job: Job) -> CoExecutionGroup:
        """Leave the seat but keep the memory. Returns the group."""
        assert job.home is not None
        assert job.seat is not None
        group = self._cluster.groups[job.home.group]
        group.seats.remove(job.seat)
        job.seat = None
        self._cluster.changed.add(group.id)
        return group

    def arrive(self, job: Job, asks_by: float) -> list[str]:
        """The state is loaded, so leave the old home. Returns nodes to give back.

        ``asks_by`` is the time by which the job should ask for its next rollout.
        """
        old, new = job.home, job.destination
        assert new is not None
        assert job.next_seat is not None
        freed = self._cluster.unpin(job, old, keep=new) if old else []
        job.home, job.seat = new, job.next_seat
        job.destination = job.next_seat = None
        job.going = False
        job.seat.arrive(job.asked, asks_by)
        job.asked = False
        self._cluster.changed.add(new.group)
        return freed
