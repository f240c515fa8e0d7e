"""Engines and replicas of one or several workers, their reports, and who hears of them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from rollpacker.core.types import EngineId, Phase, ReplicaId
from rollpacker.policy.engines.fleet import Fleet, Layout
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.placement import ProcessSlot

_Engine = tuple[int, EngineId]
"""Devices that it spans, and its number: that of the first of the smallest that it covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Devices are gone, with what was on them; ``text`` says how."""

    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]
    text: str

    def __str__(self) -> str:
        gone = [*(f"engine {n}" for n in self.engines), *(f"replica {n}" for n in self.replicas)]
        return f"{self.text}; lost: {', '.join(gone)}" if gone else self.text


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens, and must not wait."""

    engine: Callable[[EngineId, msg.EngineReport], None]
    replica: Callable[[ReplicaId, msg.ReplicaReport], None]
    lost: Callable[[Loss], None]


class Topology:
    """Workers by what they are a part of; the first of an engine, or a replica, leads it.

    Args:
        slots: by number.
    """

    def __init__(self, slots: Sequence[ProcessSlot] = ()) -> None:
        self._posts = slots
        self.engines: dict[_Engine, tuple[int, ...]] = {}
        self.replicas: dict[ReplicaId, tuple[int, ...]] = {}
        for number, slot in enumerate(slots):
            if slot.engine is not None:
                key = (slot.engine.span.size, slot.engine.engine)
                self.engines[key] = (*self.engines.get(key, ()), number)
            if slot.replica is not None:
                replica = slot.replica.replica
                self.replicas[replica] = (*self.replicas.get(replica, ()), number)
        self.size = min((size for size, _ in self.engines), default=1)
        """Devices of the smallest engines."""
        self._said: dict[int, deque[msg.ReplicaReport]] = defaultdict(deque)

    @property
    def workers(self) -> set[int]:
        """All of them, those that have died too."""
        return {*range(len(self._posts))}

    def engine(self, worker: int) -> EngineId:
        """That it is a part of."""
        part = self._posts[worker].engine
        assert part is not None
        return part.engine

    def replica(self, worker: int) -> ReplicaId:
        """That it is a part of."""
        part = self._posts[worker].replica
        assert part is not None
        return part.replica

    def node(self, worker: int) -> int:
        return self._posts[worker].device.node

    def decodes(self, worker: int) -> bool:
        """Whether it is a part of an engine."""
        return self._posts[worker].engine is not None

    def only(self, phase: Phase) -> list[int]:
        """Workers that lead an engine and train nothing, or that train and decode nothing."""
        if phase == "rollout":
            leads = {part[0] for part in self.engines.values()}
            return [n for n in sorted(leads) if self._posts[n].replica is None]
        return [n for n, slot in enumerate(self._posts) if slot.engine is None]

    def whole(self, live: Collection[int]) -> tuple[ReplicaId, ...]:
        """Replicas all of whose workers live."""
        return tuple(r for r, part in self.replicas.items() if all(w in live for w in part))

    def decoding(self, live: Collection[int]) -> tuple[EngineId, ...]:
        """The smallest engines, those all of whose workers live."""
        return tuple(
            engine
            for (size, engine), part in self.engines.items()
            if size == self.size and all(w in live for w in part)
        )

    def covered(self, size: int, engine: EngineId) -> tuple[EngineId, ...]:
        """The smallest engines on the devices of one of ``size``."""
        return tuple(EngineId(engine + n) for n in range(size // self.size))

    def fleet(self, layout: Layout, live: Collection[int]) -> Fleet:
        """What is live, by devices."""
        of = [slot.device for slot in self._posts]
        engines = {e: self.engines[self.size, e] for e in self.decoding(live)}
        replicas = {r: self.replicas[r] for r in self.whole(live)}
        return Fleet(
            layout=layout,
            engines={e: tuple(of[worker] for worker in part) for e, part in engines.items()},
            replicas={r: tuple(of[worker] for worker in part) for r, part in replicas.items()},
        )

    def hear(self, worker: int, report: msg.ReplicaReport) -> msg.ReplicaReport | None:
        """The replica's report, when all of its workers have sent theirs.

        Each of them covers the whole replica, so it is the lead's; it took from the first's start
        to the last's end.
        """
        part = self.replicas[self.replica(worker)]
        if len(part) == 1:
            return report
        self._said[worker].append(report)
        if not all(self._said[member] for member in part):
            return None
        said = [self._said[member].popleft() for member in part]
        began, ended = min(each.start_s for each in said), max(each.end_s for each in said)
        return replace(said[0], start_s=began, end_s=ended)

    def forget(self, workers: Collection[int]) -> None:
        """What these have said and others have not: they are gone."""
        for worker in workers:
            self._said.pop(worker, None)

    def without(
        self, worker: int, formed: Collection[_Engine]
    ) -> tuple[set[int], tuple[EngineId, ...], tuple[ReplicaId, ...]]:
        """What ends with a worker: workers, the smallest engines, and replicas.

        The others of its engine, or of its replica, would wait for it in vain: what they hold is a
        part of nothing. An engine's devices decode no more, whatever their size.

        Args:
            worker: that has died.
            formed: larger engines that decode now.
        """
        workers, replicas = {worker}, set[ReplicaId]()
        if self._posts[worker].replica is not None:
            replicas.add(self.replica(worker))
            workers |= {*self.replicas[self.replica(worker)]}
        mine = {key for key, part in self.engines.items() if workers & {*part}}
        engines = {one for key in mine for one in self.covered(*key)}
        for key in formed:
            if engines & {*self.covered(*key)}:
                engines |= {*self.covered(*key)}
        for key, part in self.engines.items():
            if engines & {*self.covered(*key)}:
                workers |= {*part}
        return workers, tuple(sorted(engines)), tuple(sorted(replicas))
