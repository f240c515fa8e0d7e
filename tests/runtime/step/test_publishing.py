"""Publications, whatever comes in what order; scripted workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.pool.pool import Loss
from rollpacker.runtime.step.publishing import Publishing

VERSION = 7


class Scripted:
    """Engines and replicas that do one thing at a time, when the test says which.

    ``awake``: formed engines that have not said that they sleep. A replica's number is that of its
    file, so that it is seen whose weights are loaded. Engines and replicas are dealt to ``nodes``.
    """

    def __init__(
        self, *, apart: bool, engines: int, replicas: int, formed: dict[int, int], nodes: int = 1
    ) -> None:
        self.apart = apart
        self.transport = self if apart else None
        self.nodes = nodes
        self.sending = False
        self.receiving: set[EngineId] = set()
        self.places: dict[int, SharedWeights] = {}
        self.engines = tuple(map(EngineId, range(engines)))
        self.replicas = tuple(map(ReplicaId, range(replicas)))
        self.awake = {EngineId(engine): size for engine, size in formed.items()}
        self.formed = dict(self.awake)
        self.asleep: set[EngineId] = set()
        self.sharing: ReplicaId | None = None
        self.shared: SharedWeights | None = None
        self.loading: set[EngineId] = set()
        self.loads = self.done = 0

    def publish(self) -> None:
        self.publishing = Publishing(cast(Any, self), VERSION, self.finish)

    def finish(self) -> None:
        self.done += 1

    # What a publication asks for --------------------------------------------------------------

    def disband(self) -> dict[EngineId, int]:
        return self.formed

    def share(self) -> ReplicaId:
        assert self.apart
        assert not self.awake
        assert self.sharing is None
        replica = self.sharing = self.replicas[0]
        return replica

    def node(self, engine: EngineId) -> int:
        return engine % self.nodes

    def home(self, replica: ReplicaId) -> int:
        return replica % self.nodes

    def carry(self, replica: ReplicaId, size: int) -> list[EngineId]:
        assert not self.sending
        assert not self.receiving
        assert replica in self.replicas
        assert size == 9
        first = {self.node(e): e for e in reversed(self.engines)}
        self.receiving = {e for node, e in first.items() if node != self.home(replica)}
        self.sending = bool(self.receiving)
        return sorted(self.receiving)

    def leave(self, then: Callable[[], None]) -> None:
        then()

    def part(self) -> None:
        assert not self.sending
        assert not self.receiving

    def abandon(self, kept: list[int], why: str) -> None:
        assert why == "no weights came: no road"
        for engine in [e for e in self.engines if self.node(e) not in kept]:
            self.lose_engine(engine)

    def load_weights(self, version: int, weights: dict[int, SharedWeights] | None) -> None:
        assert version == VERSION
        assert not self.awake
        if not self.apart:
            assert weights is None
        else:
            assert weights is not None
            assert {self.node(e) for e in self.engines} <= weights.keys()
            assert all(weights[node] == self.places[node] for node in weights)
        self.loads += 1
        self.loading = {*self.engines}

    # What may happen --------------------------------------------------------------------------

    def sleep(self, engine: EngineId) -> None:
        size = self.awake.pop(engine)
        self.publishing.slept(engine, size)

    def share_now(self) -> None:
        assert self.sharing is not None
        self.shared = SharedWeights(Path(f"weights-{self.sharing}"), 9)
        self.places = {self.home(self.sharing): self.shared}
        self.sharing = None
        self.publishing.shared(msg.Shared(weights=self.shared, start_s=0.0, end_s=0.0))

    def carried(self, engine: EngineId | None, problem: str = "") -> None:
        weights = None
        if engine is None:
            self.sending = False
        else:
            self.receiving.remove(engine)
            if not problem:
                weights = SharedWeights(Path(f"carried-{engine}"), 9)
                self.places[self.node(engine)] = weights
        self.publishing.carried(
            engine, msg.Carried(weights=weights, start_s=0.0, end_s=0.0, problem=problem)
        )

    def fail(self) -> None:
        """Who is still at it finds that the others are not."""
        who = None if self.sending else min(self.receiving)
        self.carried(who, "no road")

    def load(self, engine: EngineId) -> None:
        self.loading.remove(engine)
        self.publishing.loaded(engine)

    def lose_engine(self, engine: EngineId) -> None:
        gone = {engine}
        for first, size in [*self.awake.items()]:
            if first <= engine < first + size:
                gone |= set(map(EngineId, range(first, first + size)))
                del self.awake[first]
        self.engines = tuple(e for e in self.engines if e not in gone)
        self.loading -= gone
        self.receiving -= gone
        self.publishing.lose(Loss(engines=tuple(sorted(gone)), replicas=(), text="gone"))

    def lose_replica(self, replica: ReplicaId) -> None:
        self.replicas = tuple(r for r in self.replicas if r != replica)
        if self.sharing == replica:
            self.sharing = None
        elif self.shared is not None and self.shared.path.name == f"weights-{replica}":
            self.sending = False
        self.publishing.lose(Loss(engines=(), replicas=(replica,), text="gone"))

    def next(self) -> list[Callable[[], None]]:
        """What goes on without a loss."""
        return [
            *(lambda e=e: self.sleep(e) for e in sorted(self.awake)),
            *([self.share_now] if self.sharing is not None else ()),
            *([lambda: self.carried(None)] if self.sending else ()),
            *(lambda e=e: self.carried(e) for e in sorted(self.receiving)),
            *(lambda e=e: self.load(e) for e in sorted(self.loading)),
        ]

    def losses(self) -> list[Callable[[], None]]:
        """Not the last one."""
        engines = {e for e in self.engines if len({*self.engines} - self._with(e)) > 0}
        replicas = self.replicas if len(self.replicas) > 1 else ()
        return [
            *(lambda e=e: self.lose_engine(e) for e in sorted(engines)),
            *(lambda r=r: self.lose_replica(r) for r in replicas),
        ]

    def _with(self, engine: EngineId) -> set[EngineId]:
        for first, size in self.awake.items():
            if first <= engine < first + size:
                return set(map(EngineId, range(first, first + size)))
        return {engine}


FORMED = st.sampled_from([{}, {0: 2}, {2: 2}, {0: 2, 2: 2}, {0: 4}, {0: 2, 4: 2}])


@given(data=st.data(), formed=FORMED, replicas=st.integers(1, 3), nodes=st.integers(1, 3))
def test_it_ends_once_whatever_is_lost_and_when(
    data: st.DataObject, formed: dict[int, int], replicas: int, nodes: int
) -> None:
    formed = formed if nodes == 1 else {}
    workers = Scripted(apart=True, engines=6, replicas=replicas, formed=formed, nodes=nodes)
    workers.publish()
    while not workers.done:
        assert workers.next(), "nothing is left that could end it"
        choices = workers.next()
        losses = workers.losses()
        if losses and data.draw(st.integers(0, 3)) == 0:
            choices = losses
        elif (workers.sending or workers.receiving) and data.draw(st.integers(0, 3)) == 0:
            choices = [workers.fail]
        data.draw(st.sampled_from(choices))()
        if not workers.engines:
            return  # all were where no weights came: the run ends by that
    assert workers.loads == 1
    assert workers.shared is not None
    assert not workers.loading
    while losses := workers.losses():
        data.draw(st.sampled_from(losses))()
    assert (workers.done, workers.loads) == (1, 1)


@given(data=st.data(), replicas=st.integers(1, 3))
def test_where_engines_share_the_weights_nothing_is_shared_first(
    data: st.DataObject, replicas: int
) -> None:
    workers = Scripted(apart=False, engines=3, replicas=replicas, formed={})
    workers.publish()
    while not workers.done:
        losses = workers.losses() if data.draw(st.booleans()) else []
        data.draw(st.sampled_from([*workers.next(), *losses]))()
    assert (workers.done, workers.loads) == (1, 1)


@pytest.mark.parametrize("report", [(EngineId(0), 1), (EngineId(1), 1), (EngineId(4), 2)])
def test_the_sleep_of_a_member_is_not_that_of_the_engine(report: tuple[EngineId, int]) -> None:
    """Members reported theirs when the engine was formed, which may be heard late."""
    workers = Scripted(apart=True, engines=6, replicas=1, formed={0: 2, 2: 2})
    workers.publish()
    workers.publishing.slept(*report)
    workers.sleep(EngineId(2))
    assert workers.sharing is None
    workers.sleep(EngineId(0))
    assert workers.sharing == 0


def test_nodes_that_weights_cannot_be_brought_to_are_given_up() -> None:
    workers = Scripted(apart=True, engines=4, replicas=1, formed={}, nodes=2)
    workers.publish()
    for _ in range(3):
        workers.share_now()
        workers.carried(None, "no road")
        workers.carried(EngineId(1), "no road")
    assert workers.engines == (0, 2)
    workers.share_now()
    workers.load(EngineId(0))
    workers.load(EngineId(2))
    assert (workers.done, workers.loads) == (1, 1)
