"""When the devices of a training replica are free to sum gradients."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, Protocol

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.policy.ledger import Ledger

Layout = Literal["colocated", "separate"]
"""Whether engines and replicas cover the same devices, or have devices of their own."""


class Replicas(Protocol):
    """Of one step."""

    def start(self, engines: tuple[EngineId, ...], replicas: tuple[ReplicaId, ...]) -> None:
        """A step begins with these."""
        ...

    def of(self, engine: EngineId) -> ReplicaId | None:
        """The replica on an engine's devices, if there is one."""
        ...

    def free(self, replica: ReplicaId) -> bool:
        """Whether it may sum gradients while the rollout goes on."""
        ...


class Colocated:
    """Replicas on the devices of the engines: one is free while none of its own decodes.

    A replica has the number of its first engine, and lies on those up to the next replica's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._members: dict[ReplicaId, tuple[EngineId, ...]] = {}
        self._of: dict[EngineId, ReplicaId] = {}

    def start(self, engines: tuple[EngineId, ...], replicas: tuple[ReplicaId, ...]) -> None:
        """A step begins with these."""
        ends = [*(bisect_left(engines, replica) for replica in replicas), len(engines)]
        self._members = {
            replica: engines[ends[place] : ends[place + 1]]
            for place, replica in enumerate(replicas)
        }
        self._of = {engine: one for one, members in self._members.items() for engine in members}

    def of(self, engine: EngineId) -> ReplicaId | None:
        """The replica that its devices are part of."""
        return self._of.get(engine)

    def free(self, replica: ReplicaId) -> bool:
        """Whether none of its devices decodes."""
        return not any(map(self._ledger.decodes, self._members[replica]))


class Separate:
    """Replicas on devices of their own: always free, from the first complete group on."""

    def start(self, engines: tuple[EngineId, ...], replicas: tuple[ReplicaId, ...]) -> None:
        """Nothing to know."""

    def of(self, engine: EngineId) -> ReplicaId | None:  # noqa: ARG002 - the protocol's
        """None: an engine's devices are its own."""
        return None

    def free(self, replica: ReplicaId) -> bool:  # noqa: ARG002 - the protocol's
        """Always."""
        return True
