"""Where a job may run, and when: the phases of a step, on nodes that others use too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rollpacker.core.types import Phase

if TYPE_CHECKING:
    from rollpacker.runtime.cluster.cluster import Launcher


class DisplacedError(RuntimeError):
    """The nodes have failed with what was on them: the job goes on from its last checkpoint."""


class WaitStoppedError(RuntimeError):
    """The wait for nodes was given up because the user wants to stop."""


class Tenant(Protocol):
    """What a job has on its nodes."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes that run the phases on this machine, at this moment."""
        ...

    def fence(self, stop_at: float | None) -> None:
        """Processes on other nodes may run until then, in monotonic seconds of this machine; None
        while they are idle, 0 stops them."""
        ...

    async def offload(self, phase: Phase) -> int:
        """Who runs that phase, and no other, leaves the devices; the bytes of host memory that
        they keep on a node, at most."""
        ...

    async def onload(self, phase: Phase) -> None: ...


class PhaseNodes(Protocol):
    """Asks for the nodes of each phase; a job that has its own needs none (``OwnNodes``).

    ``stats`` counts phases and what they waited, for the run's summary; ``launcher`` starts agents
    on the nodes, where Ray does not.
    """

    stats: dict[str, float]
    launcher: Launcher | None

    async def open(
        self,
        tenant: Tenant,
        fail: Callable[[Exception], None],
        release_tail: Callable[[], None],
    ) -> None:
        """Register the job.

        Args:
            tenant: of this event loop.
            fail: takes what ends the job wherever it is, there.
            release_tail: is told there that another job has the nodes of the running rollout.
        """
        ...

    async def begin(self, phase: Phase) -> None:
        """Wait for the phase's nodes and go there; nothing to do when they are held already.

        Raises ``DisplacedError``, ``WaitStoppedError``, ``ValueError`` or whatever else keeps the
        job from going on.
        """
        ...

    async def offer_tail(self) -> None:
        """Most responses of the running rollout are there: others may have its nodes."""
        ...

    async def end(self) -> None:
        """The running phase is done: the nodes are free."""
        ...

    def interrupt(self) -> None:
        """The user wants to stop: wait for no more rollouts; the second time, for nothing."""
        ...

    async def close(self, *, displaced: bool = False) -> None:
        """The job is over, done or not; ``displaced``: it starts again and keeps its place."""
        ...


async def leave(phases: PhaseNodes) -> bool:
    """Give the nodes back; False when the user wants to stop before that was answered."""
    try:
        await phases.end()
    except WaitStoppedError:
        return False
    return True


class OwnNodes:
    """A job that shares its nodes with nobody."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.launcher: Launcher | None = None

    async def open(
        self,
        tenant: Tenant,
        fail: Callable[[Exception], None],
        release_tail: Callable[[], None],
    ) -> None:
        """Nothing to register."""

    async def begin(self, phase: Phase) -> None:
        """The nodes are there."""

    async def offer_tail(self) -> None:
        """Nobody would have them."""

    async def end(self) -> None:
        """Nobody waits for them."""

    def interrupt(self) -> None:
        """Nobody waits."""

    async def close(self, *, displaced: bool = False) -> None:
        """Nothing to give back."""
