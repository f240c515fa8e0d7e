"""The nodes of a job's phases, if jobs share nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rollpacker.core.types import Phase

if TYPE_CHECKING:
    from rollpacker.runtime.cluster.cluster import Launcher


class DisplacedError(RuntimeError):
    """The nodes have failed with their processes, so the job goes on from its last checkpoint."""


class WaitStoppedError(RuntimeError):
    """The wait for nodes has ended because the user wants to stop."""


class Tenant(Protocol):
    """The job's processes on its nodes."""

    @property
    def pids(self) -> Sequence[int]: ...

    def fence(self, stop_at: float | None) -> None:
        """Let processes on other nodes run until ``stop_at`` (monotonic seconds of this machine).
        None: they are idle. 0 stops them."""
        ...

    async def offload(self, phase: Phase) -> int:
        """Move that phase's processes off the devices. Returns the most bytes in a node's host
        memory."""
        ...

    async def onload(self, phase: Phase) -> None: ...


class PhaseNodes(Protocol):
    """Asks for the nodes of each phase. A job with its own nodes uses ``OwnNodes``. ``stats`` is
    for the run's summary. ``launcher`` starts agents on the nodes, unless Ray does."""

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
            fail: called there with an error that ends the job at any point.
            release_tail: called there when another job has the nodes of the running rollout.
        """
        ...

    async def begin(self, phase: Phase) -> None:
        """Wait for the phase's nodes and go there. If they are held already, do nothing. Raises
        ``DisplacedError``, ``WaitStoppedError``, ``ValueError`` or another error that ends the
        job."""
        ...

    async def offer_tail(self) -> None:
        """Offer the running rollout's nodes to others, as most responses are there."""
        ...

    async def end(self) -> None: ...

    def interrupt(self) -> None:
        """The user wants to stop: wait for no more rollouts, the second time for nothing."""
        ...

    async def close(self, *, displaced: bool = False) -> None:
        """End the job. If ``displaced``, it starts again and keeps its place."""
        ...


async def leave(phases: PhaseNodes) -> bool:
    """Release the nodes. False if the user wants to stop before the answer."""
    try:
        await phases.end()
    except WaitStoppedError:
        return False
    return True


class OwnNodes:
    """A job that shares its nodes with no other job."""

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
        """The nodes are always there."""

    async def offer_tail(self) -> None:
        """No other job wants them."""

    async def end(self) -> None:
        """No other job waits for them."""

    def interrupt(self) -> None:
        """There is no wait."""

    async def close(self, *, displaced: bool = False) -> None:
        """Nothing to release."""
