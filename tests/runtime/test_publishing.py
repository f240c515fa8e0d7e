"""Publications, whatever comes in what order; scripted workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.runtime import messages as msg
from rollpacker.runtime.protocols import Loss
from rollpacker.runtime.publishing import Publishing
from rollpacker.runtime.shared_weights import SharedWeights

VERSION = 7


class Scripted:
    """Engines and replicas that do one thing at a time, when the test says which.

    ``awake``: formed engines that have not said that they sleep. A replica's number is that of its
    file, so that it is seen whose weights are loaded.
    """

    def __init__(self, *, apart: bool, engines: int, replicas: int, formed: dict[int, int]) -> None:
        self.apart = apart
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
        assert self.shared is None
        replica = self.sharing = self.replicas[0]
        return replica

    def load_weights(self, version: int, weights: SharedWeights | None) -> None:
        assert version == VERSION
        assert not self.awake
        assert weights == self.shared
        assert (weights is not None) == self.apart
        self.loads += 1
        self.loading = {*self.engines}

    # What may happen --------------------------------------------------------------------------

    def sleep(self, engine: EngineId) -> None:
        size = self.awake.pop(engine)
        self.publishing.slept(engine, size)

    def share_now(self) -> None:
        self.shared, self.sharing = SharedWeights(Path(f"weights-{self.sharing}")), None
        self.publishing.shared(msg.Shared(weights=self.shared, start_s=0.0, end_s=0.0))

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
        self.publishing.lose(Loss(engines=tuple(sorted(gone)), replicas=(), text="gone"))

    def lose_replica(self, replica: ReplicaId) -> None:
        self.replicas = tuple(r for r in self.replicas if r != replica)
        if self.sharing == replica:
            self.sharing = None
        self.publishing.lose(Loss(engines=(), replicas=(replica,), text="gone"))

    def next(self) -> list[Callable[[], None]]:
        """What goes on without a loss."""
        return [
            *(lambda e=e: self.sleep(e) for e in sorted(self.awake)),
            *([self.share_now] if self.sharing is not None else ()),
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


@given(data=st.data(), formed=FORMED, replicas=st.integers(1, 3))
def test_it_ends_once_whatever_is_lost_and_when(
    data: st.DataObject, formed: dict[int, int], replicas: int
) -> None:
    workers = Scripted(apart=True, engines=6, replicas=replicas, formed=formed)
    workers.publish()
    while not workers.done:
        assert workers.next(), "nothing is left that could end it"
        choices = workers.next()
        losses = workers.losses()
        if losses and data.draw(st.integers(0, 3)) == 0:
            choices = losses
        data.draw(st.sampled_from(choices))()
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
