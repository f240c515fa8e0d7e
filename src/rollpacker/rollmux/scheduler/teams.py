"""The nodes that each team uses, against its guarantee.

Jobs that share a node count for equal parts of it. A team's share is the larger one of both pools:
dominant resource fairness (Ghodsi et al., NSDI'11), weighted by the guarantees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.inventory import Needs
from rollpacker.rollmux.model.seat import POOLS
from rollpacker.rollmux.model.settings import Team

_ROUNDING = 1e-9


class Shares:
    """Node-equivalents in use, by team."""

    def __init__(self, cluster: Cluster, teams: Iterable[Team]) -> None:
        self._cluster = cluster
        self._teams = {team.name: team for team in teams}
        self._used: dict[str, list[float]] = {}
        for node in cluster.nodes.values():
            for name in node.pins:
                team = cluster.jobs[name].spec.team
                used = self._used.setdefault(team, [0.0, 0.0])
                used[node.pool] += 1.0 / len(node.pins)

    def used(self, team: str) -> tuple[float, float]:
        rollout, train = self._used.get(team, (0.0, 0.0))
        return rollout, train

    def guaranteed(self, team: str) -> tuple[float, float]:
        return self._teams[team].guaranteed if team in self._teams else (0.0, 0.0)

    def ratio(self, team: str) -> float:
        """Used over guaranteed nodes. A missing guarantee counts as one node."""
        used, owned = self.used(team), self.guaranteed(team)
        return max(used[pool] / max(owned[pool], 1.0) for pool in POOLS)

    def entitled(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that fit into their team's guarantee, together with the jobs before them."""
        found: list[Job] = []
        more: dict[str, list[float]] = {}
        for job in jobs:
            team, gangs = job.spec.team, job.spec.gangs
            used, owned = self.used(team), self.guaranteed(team)
            mine = more.setdefault(team, [0.0, 0.0])
            if all(used[p] + mine[p] + gangs[p] <= owned[p] + _ROUNDING for p in POOLS):
                found.append(job)
                more[team] = [mine[pool] + gangs[pool] for pool in POOLS]
        return found

    def borrows(self, team: str, pool: int) -> bool:
        return self.used(team)[pool] > self.guaranteed(team)[pool] + _ROUNDING

    def to_reclaim(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that must leave so that ``jobs`` get the guaranteed nodes of their teams.

        Only nodes used solely by borrowers are reclaimed: nodes that are being left first, then
        those with the lowest priority and the latest jobs. A job that cannot get enough nodes
        reclaims none.
        """
        chosen: dict[str, Job] = {}
        counted_on: set[str] = set()
        free_for_others = [0, 0]
        for job in jobs:
            wanted: list[tuple[str, list[Job]]] = []
            for pool in POOLS:
                gang = job.spec.gangs[pool]
                needs = job.needs(pool)
                free = max(self._cluster.inventory.free(pool, needs) - free_for_others[pool], 0)
                lacking = int(gang - min(free, gang))
                found = self._borrowed(pool, needs, counted_on)
                if len(found) < lacking:
                    break
                wanted += found[:lacking]
                free_for_others[pool] += gang - lacking
            else:
                counted_on.update(name for name, _ in wanted)
                chosen |= {each.spec.id: each for _, on in wanted for each in on}
        return [each for each in chosen.values() if not each.leaves]

    def _borrowed(
        self, pool: int, needs: Needs, without: Collection[str]
    ) -> list[tuple[str, list[Job]]]:
        """Nodes used only by borrowers, with their jobs. The first to be left come first."""
        found: list[tuple[str, list[Job]]] = []
        for node in self._cluster.nodes.values():
            if node.pool != pool or node.name in without:
                continue
            on = [self._cluster.jobs[name] for name in node.pins]
            if self._cluster.inventory.takes(node.name, needs) and all(
                self._may_leave(each, pool) for each in on
            ):
                found.append((node.name, on))
        return sorted(found, key=lambda pair: _importance(pair[1]))

    def _may_leave(self, job: Job, pool: int) -> bool:
        return job.home is not None and not job.going and self.borrows(job.spec.team, pool)


def _importance(jobs: list[Job]) -> tuple[bool, int, float]:
    stays = not all(job.leaves for job in jobs)
    latest = max(job.admitted_at for job in jobs)
    return stays, max(job.spec.priority for job in jobs), -latest
