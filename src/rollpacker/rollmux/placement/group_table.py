"""A row of numbers per group, to scan all groups at once for a job."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup
from rollpacker.rollmux.model.seat import POOLS
from rollpacker.rollmux.model.settings import Settings

TOP = 24  # groups that are examined closely


class GroupTable:
    """One row of numbers per group."""

    COLUMNS = 6
    SIZE, ROLLOUTS, TRAINS, ROLLOUT_LOAD, TRAIN_LOAD, TRAIN_MAX = range(COLUMNS)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rows = np.full((64, self.COLUMNS), np.inf)
        self._slots: dict[int, int] = {}
        self._ids = np.full(64, -1, dtype=np.int64)
        self._free: list[int] = list(range(63, -1, -1))

    def refresh(self) -> None:
        for number in sorted(self._cluster.changed):
            group = self._cluster.groups.get(number)
            if group is None:
                self._forget(number)
            else:
                slot = self._slot(number)
                self._rows[slot] = self._row(group)
        self._cluster.changed.clear()

    def _forget(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._rows[slot] = np.inf
            self._ids[slot] = -1
            self._free.append(slot)

    def _slot(self, number: int) -> int:
        if number not in self._slots:
            if not self._free:
                old = len(self._rows)
                self._rows = np.vstack([self._rows, np.full_like(self._rows, np.inf)])
                self._ids = np.concatenate([self._ids, np.full(old, -1, dtype=np.int64)])
                self._free.extend(range(2 * old - 1, old - 1, -1))
            self._slots[number] = self._free.pop()
            self._ids[self._slots[number]] = number
        return self._slots[number]

    def _row(self, group: CoExecutionGroup) -> tuple[float, ...]:
        loads = [list(node_loads(group, pool).values()) or [0.0] for pool in POOLS]
        sizes = len(group.seats), len(group.nodes[0]), len(group.nodes[1])
        return (*map(float, sizes), min(loads[0]), min(loads[1]), max(loads[1]))

    def scan(
        self, gangs: tuple[int, int], loads: tuple[float, float], settings: Settings
    ) -> list[int]:
        """Groups that might take a job: the cheapest first, then the fullest."""
        rows = self._rows
        keep = np.flatnonzero(rows[:, self.SIZE] < settings.group_size)
        rows = rows[keep]
        fits = [
            rows[:, column] + load <= 1.0
            for column, load in ((self.ROLLOUT_LOAD, loads[0]), (self.TRAIN_LOAD, loads[1]))
        ]
        cost = np.zeros(len(rows))
        for pool, column, price in (
            (0, self.ROLLOUTS, settings.prices.rollout),
            (1, self.TRAINS, settings.prices.train),
        ):
            need = np.maximum(gangs[pool] - rows[:, column], 0.0)
            cost += price * np.where(fits[pool], need, float(gangs[pool]))
        some = fits[0] | fits[1]
        ranked = np.lexsort((self._ids[keep], -rows[:, self.TRAIN_MAX], cost))
        ranked = ranked[some[ranked]][:TOP]
        return [int(number) for number in self._ids[keep][ranked]]


def node_loads(
    group: CoExecutionGroup, pool: int, without: Collection[str] = ()
) -> dict[str, float]:
    """Share of the time that each node of a pool must work to meet all targets."""
    loads = {name: 0.0 for name in group.nodes[pool]}
    for seat in group.seats:
        if seat.job in without:
            continue
        period = max(seat.target, 1.0) * (seat.r + seat.t)
        need = seat.seconds(pool) / period
        for name in loads:
            if group.bits[name] & seat.masks[pool]:
                loads[name] += need
    return loads
