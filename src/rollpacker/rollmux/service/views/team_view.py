"""What each team is guaranteed, has, has borrowed and waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.scheduler.teams import Shares
from rollpacker.rollmux.service.state.transaction_log import TransactionLog


def teams(core: TransactionLog) -> list[dict[str, Any]]:
    """Those with a guarantee, in their order, then others that have live jobs, by name.

    ``""`` are the jobs of no team; without any team there is nothing to tell of them.
    """
    cluster, listed = core.brain.scheduler.cluster, [team.name for team in core.settings.teams]
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in cluster.jobs.values():
        jobs[job.spec.team].append(job)
    names = listed + sorted(jobs.keys() - set(listed))
    if names == [""]:
        return []
    shares = Shares(cluster, core.settings.teams)
    return [_team(name, jobs[name], shares) for name in names]


def _team(name: str, jobs: Iterable[Job], shares: Shares) -> dict[str, Any]:
    used, guaranteed = shares.used(name), shares.guaranteed(name)
    borrowed = [max(have - own, 0.0) for have, own in zip(used, guaranteed, strict=True)]
    placed = [job for job in jobs if job.waits_since is None]
    waiting = [job for job in jobs if job.waits_since is not None]
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


def _by_pool(values: Iterable[float]) -> dict[str, float]:
    return dict(zip(POOL_NAMES, values, strict=True))
