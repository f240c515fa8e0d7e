"""Jobs that wait for nodes: their order, backfilling, and reclaiming of borrowed nodes.

The first job that does not fit reserves the nodes that are expected to be free soonest. Other jobs
may use them only if they end before (EASY backfilling, Lifka, 1995).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rollpacker.rollmux.model.cluster import Cluster, Job, Reservation
from rollpacker.rollmux.model.inventory import POOL_NAMES, Fixed, Inventory, Needs
from rollpacker.rollmux.model.seat import NEVER, POOLS
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import expected, expected_end
from rollpacker.rollmux.placement.placement import Site
from rollpacker.rollmux.scheduler.teams import Shares

Choose = Callable[[Job, float], Site | None]
MOST_OF_A_TEAM = 500  # most jobs of one team that may wait, since each event looks at all of them
TRIED = 20  # jobs that are tried in one event
_NAMED = 3  # most nodes without an agent that a message names
RETRY_S = 600.0
"""Seconds after which waiting jobs are tried again without an event, since slack grows."""


class Queue:
    """Chooses the next jobs to get nodes. It changes nothing except the reservation.

    ``choose`` returns the site that a job would get now, or None.
    """

    def __init__(self, cluster: Cluster, settings: Settings, choose: Choose) -> None:
        self._cluster = cluster
        self._settings = settings
        self._choose = choose
        self.jobs: dict[str, Job] = {}  # waiting jobs, in no order
        self.urgent: dict[str, Job] = {}
        """Jobs that need nodes of their own and get the next free ones."""
        self.retry_at = NEVER
        self._order: list[Job] = []

    def urge(self, job: Job, urgent: bool) -> None:
        job.urgent = urgent
        if urgent:
            self.urgent[job.spec.id] = job
        else:
            self.urgent.pop(job.spec.id, None)

    def put(self, job: Job, now: float, *, clock_runs: bool) -> None:
        job.wait(now, clock_runs=clock_runs)
        self.jobs[job.spec.id] = job

    def take(self, job: Job, now: float) -> None:
        job.admit(now)
        del self.jobs[job.spec.id]
        if not self.jobs:
            self._cluster.reservation = None
            self.retry_at = NEVER

    def restore(self, retry_at: float) -> None:
        waiting = (job for job in self._cluster.jobs.values() if job.waits_since is not None)
        self.jobs = {job.spec.id: job for job in waiting}
        self.urgent = {job.spec.id: job for job in self._cluster.jobs.values() if job.urgent}
        self.retry_at = retry_at

    def waiting(self, now: float) -> list[Job]:
        """Waiting jobs that are not held, the next one first."""
        jobs = [job for job in self.jobs.values() if not job.held]
        if len(jobs) < 2:
            return jobs
        shares = Shares(self._cluster, self._settings.teams)
        return sorted(jobs, key=lambda job: self._turn(job, shares, now))

    def _turn(self, job: Job, shares: Shares, now: float) -> tuple[int, float, int, float, str]:
        """Sort key: running SLOs, impatient jobs, teams that are owed nodes, then by shares.

        Priorities count only inside a team.
        """
        assert job.waits_since is not None
        rank, ratio, priority = 3, shares.ratio(job.spec.team), -job.spec.priority
        if job.stopped_at is None and job.admitted:
            rank, ratio, priority = 0, 0.0, 0
        elif self._impatient(job, now):
            rank, ratio, priority = 1, 0.0, 0
        elif shares.entitled([job]):
            rank = 2
        return rank, ratio, priority, job.waits_since, job.spec.id

    def _impatient(self, job: Job, now: float) -> bool:
        return job.waits_since is not None and now - job.waits_since > self._settings.patience_s

    def offers(self, now: float) -> Iterator[tuple[Job, Site]]:
        """Jobs with their sites. Take each offer before asking for the next one."""
        self._cluster.reservation = self._for_urgent(now)
        refused: set[str] = set()
        self._order = self._possible(now)
        tries = iter(self._order)
        while len(refused) < TRIED:
            job = next((job for job in tries if job.spec.id not in refused), None)
            if job is None:
                break
            job.run_clock(now)
            site = self._choose(job, now)
            if site is not None:
                yield job, site
                # Its team now has more nodes, so the order may have changed.
                self._order = self._possible(now)
                tries = iter(self._order)
                continue
            refused.add(job.spec.id)
            if not self._settings.backfill:
                break
            if self._cluster.reservation is None:
                self._cluster.reservation = self._reserve(job, now)
        self.retry_at = now + RETRY_S if self.jobs else NEVER

    def _possible(self, now: float) -> list[Job]:
        """Waiting jobs that open nodes could take. Others would use up the tries."""
        jobs = self.waiting(now)
        if not self._settings.backfill:
            return jobs
        return [job for job in jobs if could_start(self._cluster.inventory, job)]

    def _for_urgent(self, now: float) -> Reservation | None:
        """Nodes reserved for urgent jobs: the largest request of them."""
        if not self.urgent:
            return None
        gangs = [job.spec.gangs for job in self.urgent.values()]
        fresh = max(gang[0] for gang in gangs), max(gang[1] for gang in gangs)
        return Reservation(job="", at=now, nodes=(), fresh=fresh)

    def _reserve(self, job: Job, now: float) -> Reservation | None:
        """Reserve the nodes expected to be free soonest (None if there are never enough)."""
        at, nodes, fresh = now, set[str](), [0, 0]
        for pool in POOLS:
            gang = job.spec.gangs[pool]
            needs = job.needs(pool)
            fresh[pool] = int(min(self._cluster.inventory.free(pool, needs), gang))
            ends = sorted(
                (max(self._end(name, now) for name in node.pins), node.name)
                for node in self._cluster.nodes.values()
                if node.pool == pool and self._cluster.inventory.takes(node.name, needs)
            )
            wanted = ends[: gang - fresh[pool]]
            if len(wanted) < gang - fresh[pool] or (wanted and wanted[-1][0] >= NEVER):
                return None
            at = max([at] + [end for end, _ in wanted])
            nodes |= {name for _, name in wanted}
        if self._impatient(job, now):
            at = now  # It has waited too long, so nobody else comes to these nodes any more.
        return Reservation(
            job=job.spec.id, at=at, nodes=tuple(sorted(nodes)), fresh=(fresh[0], fresh[1])
        )

    def _end(self, name: str, now: float) -> float:
        job = self._cluster.jobs[name]
        if job.leaves:
            return now + sum(expected(job))
        return expected_end(job, now)

    def to_reclaim(self) -> list[Job]:
        """After ``offers``: jobs that must leave so that teams get their guaranteed nodes."""
        if not self._settings.teams:
            return []
        shares = Shares(self._cluster, self._settings.teams)
        return shares.to_reclaim(shares.entitled(self._order))


def could_start(inventory: Inventory, job: Job) -> bool:
    """Whether enough open nodes exist for a job if nothing else ran."""
    return all(inventory.usable(pool, job.needs(pool)) >= job.spec.gangs[pool] for pool in POOLS)


def why_it_waits(cluster: Cluster, job: Job) -> str:
    """Why a job has no nodes yet, as a message."""
    never = why_never(cluster.inventory, job)
    if never is not None:
        return never
    lacks: list[str] = []
    agentless: list[str] = []
    for pool, gang in zip(POOLS, job.spec.gangs, strict=True):
        needs = job.needs(pool)
        free = cluster.inventory.free(pool, needs)
        if free < gang:
            closed = _closed(cluster.inventory, pool, needs)
            shut = f", {closed} closed" if closed else ""
            nodes = f"{POOL_NAMES[pool]} node{'s' if gang > 1 else ''}"
            mute = _without_agents(cluster.inventory, pool, needs)
            shut += f", {len(mute)} without an agent" if mute else ""
            lacks.append(f"{gang} {nodes} ({free:g} free{shut})")
            agentless += mute
    if lacks:
        own = f"it needs {' and '.join(lacks)} of its own"
        if agentless:
            more = f" and {len(agentless) - _NAMED} others" if len(agentless) > _NAMED else ""
            own += (
                f"; no agent that starts programs was heard on {', '.join(agentless[:_NAMED])}"
                f"{more}: rollpacker mux agent --node {agentless[0]} --programs FOLDER"
            )
        if not cluster.groups:
            return own
        return f"no group can take it ({_why_no_group(cluster, job)}), and {own}"
    return "the free nodes are reserved for an earlier job"


def _why_no_group(cluster: Cluster, job: Job) -> str:
    inventory = cluster.inventory
    for pool, gang in zip(POOLS, job.spec.gangs, strict=True):
        needs, name = job.needs(pool), POOL_NAMES[pool]
        shared = gang - inventory.free(pool, needs)
        if shared <= 0:
            continue  # enough nodes of this pool are free
        used = [node for node in cluster.nodes.values() if node.pool == pool]
        fitting = [node for node in used if inventory.takes(node.name, needs)]
        if len(fitting) < shared:
            few = f"only {len(fitting)}" if fitting else "no"
            return f"{few} {name} node in use is open to it"
        left = sorted(inventory.memory_gb(node.name) - node.used_gb for node in fitting)
        least = left[-int(shared)]
        if least < needs.memory_gb:
            on = f" on {shared:g} of them" if shared > 1 else ""
            memory = f"{needs.memory_gb:g} GB of a {name} node's memory"
            return f"{memory}, at most {least:g} GB are left{on}"
    return "one of them might miss its SLO"


def _closed(inventory: Inventory, pool: int, needs: Needs) -> int:
    slots = inventory.slots.values() if isinstance(inventory, Fixed) else ()
    return sum(
        slot.status != "open"
        and slot.machine.pool == POOL_NAMES[pool]
        and slot.machine.suits(needs)
        for slot in slots
    )


def _without_agents(inventory: Inventory, pool: int, needs: Needs) -> list[str]:
    slots = inventory.slots if isinstance(inventory, Fixed) else {}
    return [
        name
        for name, slot in slots.items()
        if slot.machine.pool == POOL_NAMES[pool] and slot.machine.suits(needs)
        if slot.status == "open" and not (slot.used or slot.takes(needs))
    ]


def why_never(inventory: Inventory, job: Job) -> str | None:
    """Why a job never gets nodes even if nothing else runs (None if it can)."""
    for pool, gang in zip(POOLS, job.spec.gangs, strict=True):
        needs = job.needs(pool)
        have, name = inventory.ever(pool, needs), POOL_NAMES[pool]
        if have >= gang:
            continue
        if not have and inventory.ever(pool, replace(needs, memory_gb=0.0)):
            return f"needs more host memory than any {name} node has: {needs.memory_gb:g} GB"
        such = ", ".join(f"{key}={value}" for key, value in needs.labels.items())
        more = f" with {such}" if such else ""
        devices = f" of {needs.devices} devices" if needs.devices > 1 else ""
        return f"needs {gang} {name} nodes{devices}{more}, but there are {have:g}"
    return None
