"""Node events of an owner: nodes join, close, open, fail and are drained."""

from __future__ import annotations

from math import inf

from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.inventory import Fixed
from rollpacker.rollmux.model.seat import POOLS
from rollpacker.rollmux.placement.placement import Placement, Site
from rollpacker.rollmux.scheduler.reservations import Reservations


class Maintenance:
    """Changes named nodes. A cloud's nodes cannot be changed."""

    def __init__(self, cluster: Cluster, placement: Placement, moves: Reservations) -> None:
        self._cluster = cluster
        self._placement = placement
        self._reservations = moves

    def _fixed(self, node: str) -> Fixed:
        inventory = self._cluster.inventory
        if not isinstance(inventory, Fixed):
            raise ValueError(f"node {node}: this cluster rents its nodes, so it has no inventory")
        return inventory

    def _known(self, node: str) -> Fixed:
        inventory = self._fixed(node)
        if node not in inventory.slots:
            raise ValueError(f"node {node}: no node has this name")
        return inventory

    def joined(self, now: float, event: ev.NodeJoined) -> None:
        self._fixed(event.machine.name).join(event.machine, now)

    def heard(self, event: ev.AgentHeard) -> None:
        agent = "programs" if event.programs else "heard"
        self._known(event.node).hear(event.node, agent)

    def closed(self, now: float, event: ev.NodeClosed) -> None:
        self._known(event.node).close(event.node, event.status, event.why, now)

    def opened(self, now: float, event: ev.NodeOpened) -> None:
        self._known(event.node).open(event.node, now)

    def removed(self, event: ev.NodeRemoved) -> None:
        self._known(event.node).remove(event.node)

    def failed(self, now: float, event: ev.NodeFailed) -> None:
        inventory = self._cluster.inventory
        if not isinstance(inventory, Fixed) or event.node in inventory.slots:
            inventory.fail(event.node, now, event.why)

    def bound_for(self, node: str) -> list[Job]:
        """Jobs with a reservation on a node to which they have not started to move."""
        held = self._cluster.nodes.get(node)
        jobs = [self._cluster.jobs[name] for name in held.pins] if held is not None else []
        return [
            job
            for job in jobs
            if job.destination is not None
            and not job.going
            and (job.home is None or node not in job.home.names)
        ]

    def move_out(self, now: float) -> list[Job]:
        """Reserve other nodes for jobs on draining nodes, as far as possible."""
        inventory = self._cluster.inventory
        if not isinstance(inventory, Fixed):
            return []
        moved: list[Job] = []
        for slot in inventory.slots.values():
            node = self._cluster.nodes.get(slot.machine.name)
            if slot.status != "draining" or node is None:
                continue
            for name in list(node.pins):
                job = self._cluster.jobs[name]
                if (
                    job.destination is None
                    and job.home is not None
                    and not (job.leaves or job.over)
                ):
                    self._reserve(job, now, moved)
        return moved

    def _reserve(self, job: Job, now: float, moved: list[Job]) -> None:
        assert job.home is not None
        site = self._others_instead(job)
        if not self._placement.still(site, job):
            offer = self._placement.best(job, now, below=inf, avoid=(job.home.group,))
            site = None if offer is None else offer.site
        if site is not None:
            self._reservations.reserve(job, site)
            moved.append(job)

    def _others_instead(self, job: Job) -> Site:
        assert job.home is not None
        names = job.home.nodes
        kept = [tuple(n for n in names[pool] if not self._is_to_empty(n)) for pool in POOLS]
        return Site(
            group=job.home.group,
            nodes=(kept[0], kept[1]),
            fresh=(len(names[0]) - len(kept[0]), len(names[1]) - len(kept[1])),
            price=0.0,
        )

    def _is_to_empty(self, node: str) -> bool:
        inventory = self._cluster.inventory
        return isinstance(inventory, Fixed) and inventory.slots[node].status == "draining"

    def to_empty(self, job: Job) -> bool:
        return job.home is not None and any(map(self._is_to_empty, job.home.names))
