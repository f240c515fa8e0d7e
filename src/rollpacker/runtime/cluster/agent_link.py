"""A node's agent, and the workers that it starts, from the driver's side."""

from __future__ import annotations

import time

from rollpacker.runtime.cluster import node_messages as messages
from rollpacker.runtime.ipc.link import Link


class RemoteHost:
    """A worker that an agent has started, or will."""

    def __init__(self, number: int, agent: AgentLink) -> None:
        self.link = Link()
        self._number = number
        self._agent = agent

    @property
    def pid(self) -> int:
        return 0

    def wait(self, seconds: float) -> None:
        """Agents wait for their workers."""

    def kill(self) -> None:
        """Its node may not hear of it, but nobody hears the worker any more."""
        self._agent.link.send(messages.Kill(worker=self._number))
        self.link.sever()

    async def end(self, seconds: float = 0.0) -> str:  # noqa: ARG002
        """How it ended, in words: its agent waits for it before it starts another."""
        if not self._agent.live:
            return f"its node {self._agent.name} is gone"
        code = self._agent.ended.get(self._number)
        known = "its connection closed" if code is None else f"exit code {code}"
        return f"{known} on node {self._agent.name}"


class AgentLink:
    """A node's agent, from the driver's side.

    Args:
        number: the node's.
        generation: of the agents that were there for this node, one after the other.
    """

    def __init__(self, number: int, generation: int = 0) -> None:
        self.number = number
        self.key = f"node-{number}-{generation}"
        """The name that it comes by."""
        self.name = f"{number}"
        self.link = Link()
        self.live = False
        self.ended: dict[int, int | None] = {}
        self.hosts: dict[int, RemoteHost] = {}
        self._ahead: float | None = None
        """Of its clock, at the least: what it said had been on its way."""

    def heard_clock(self, clock: float) -> None:
        """What it was there when it was told."""
        ahead = clock - time.monotonic()
        self._ahead = ahead if self._ahead is None else max(ahead, self._ahead)

    def fence(self, stop_at: float | None) -> None:
        """Its workers may run until then, by the driver's clock."""
        if stop_at is not None:
            stop_at = 0.0 if self._ahead is None else max(0.0, stop_at + self._ahead)
        self.link.send(messages.Until(stop_at=stop_at))

    def lose(self) -> None:
        """It is gone, with all that was on it."""
        self.live = False
        for host in list(self.hosts.values()):
            host.link.sever()
