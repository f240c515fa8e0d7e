"""The nodes of a cluster. An agent on each connects to the driver's rendezvous."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollpacker.config import RunConfig
from rollpacker.processes.children import allow_files
from rollpacker.runtime.cluster.devices import Place
from rollpacker.runtime.cluster.nodes import Node, Nodes, Start, start_processes
from rollpacker.runtime.ipc.failure_detector import Silence
from rollpacker.runtime.ipc.link import Host, Link
from rollpacker.runtime.ipc.rendezvous import Rendezvous
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, spawn
from rollpacker.runtime.worker.worker import WorkerSpec

_CLOSE_S = 5.0
"""Seconds for agents and their workers to leave."""
_COMING_S = 120.0
"""Seconds for a started agent to connect."""


# Messages of driver and agents, besides ``Stop``, ``Died`` and the driver's ``Beat``.


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The run, with a file's path and content that prove that the node sees the run's folder."""

    config: RunConfig
    mark: tuple[Path, str]


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's devices, the run's folder on its node, and the node's address."""

    places: tuple[Place, ...]
    folder: str
    address: str


class AgentAlive(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's heartbeat, with its clock in monotonic seconds."""

    clock: float


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """Workers run until this time of the agent's clock, then stop until the next one. None: no
    limit."""

    stop_at: float | None


class Spawn(msgspec.Struct, frozen=True, kw_only=True):
    """Start these workers with ``start``. Each connects to the driver."""

    specs: Sequence[WorkerSpec]
    start: Start


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Kill a worker, even if it is stopped."""

    worker: int


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended with this exit code."""

    worker: int
    code: int | None


class Launcher(Protocol):
    """Starts agents on the nodes of a cluster (``ray_launcher``)."""

    @property
    def host(self) -> str:
        """This machine's address for the nodes."""
        ...

    async def launch(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        """Start an agent on its own node for each name. Raises ``ValueError`` without enough
        nodes."""
        ...

    async def replace(self, address: tuple[str, int], key: bytes, number: int, name: str) -> None:
        """Replace the ``number``-th agent, which is gone, when the cluster has a node for it."""
        ...

    def close(self) -> None: ...


class RemoteHost:
    """A worker that an agent has started, or will start."""

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
        """Ask its agent, and close its connection, as the agent may be unreachable."""
        self._agent.link.send(Kill(worker=self._number))
        self.link.sever()

    async def end(self, seconds: float = 0.0) -> str:  # noqa: ARG002
        """How it ended. Its agent waits for it before it starts another one."""
        if not self._agent.live:
            return f"its node {self._agent.name} is gone"
        code = self._agent.ended.get(self._number)
        known = "its connection closed" if code is None else f"exit code {code}"
        return f"{known} on node {self._agent.name}"


class AgentLink:
    """The driver's side of a node's agent. A node may get several agents: ``generation``."""

    def __init__(self, number: int, generation: int = 0) -> None:
        self.number = number
        self.key = f"node-{number}-{generation}"
        self.name = f"{number}"
        self.link = Link()
        self.live = False
        self.ended: dict[int, int | None] = {}
        self.hosts: dict[int, RemoteHost] = {}
        self._ahead: float | None = None
        """A lower bound of its clock minus ours: its message took some time."""

    def heard_clock(self, clock: float) -> None:
        """Learn from its clock's time at the sending of a message."""
        ahead = clock - time.monotonic()
        self._ahead = ahead if self._ahead is None else max(ahead, self._ahead)

    def fence(self, stop_at: float | None) -> None:
        """Let its workers run until ``stop_at`` of the driver's clock."""
        if stop_at is not None:
            stop_at = 0.0 if self._ahead is None else max(0.0, stop_at + self._ahead)
        self.link.send(Until(stop_at=stop_at))

    def lose(self) -> None:
        self.live = False
        for host in list(self.hosts.values()):
            host.link.sever()


class RunNodes(Nodes):
    """A run's nodes in a cluster."""

    def __init__(
        self, config: RunConfig, launcher: Launcher, start: Start = start_processes
    ) -> None:
        self._config = config
        self._start = start
        self._launcher = launcher
        self._mark = Path(config.output).absolute() / ".nodes", secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._agents = [AgentLink(n) for n in range(config.devices.nodes)]
        self._generation = 0
        self._coming: dict[int, asyncio.Task[Node]] = {}
        self._nodes: list[Node] | None = None
        self._arriving: dict[int, asyncio.Future[Arrived]] = {}
        self._gate: Rendezvous | None = None
        self._silence = Silence(config.cluster.heartbeat_s)
        self._watching: asyncio.Task[None] | None = None
        self._store: Any = None

    async def gather(self) -> Sequence[Node]:
        if self._nodes is not None:
            return self._nodes
        file, held = self._mark
        file.write_text(held)
        self._gate = gate = Rendezvous(self._launcher.host, self._enter, self._loop)
        self._arriving = {agent.number: self._loop.create_future() for agent in self._agents}
        names = [agent.key for agent in self._agents]
        await self._launcher.launch(gate.address, gate.key, names)
        self._watching = spawn(self._watch())
        arrivals = (self._arrival(agent.number) for agent in self._agents)
        self._nodes = [*await asyncio.gather(*arrivals)]
        return self._nodes

    async def _arrival(self, number: int) -> Node:
        assert self._gate is not None
        host, port = self._gate.address
        try:
            async with asyncio.timeout(_COMING_S):
                arrived = await self._arriving[number]
        except TimeoutError:
            raise WorkerError(
                f"node {number} did not connect to {host}:{port} in {_COMING_S:.0f} s. Can it "
                "reach the driver's machine at this address?"
            ) from None
        return Node(
            number=number, places=arrived.places, folder=Path(arrived.folder), elsewhere=True
        )

    @property
    def lost(self) -> Collection[int]:
        return {*self._coming, *(agent.number for agent in self._agents if not agent.live)}

    def regain(self) -> Mapping[int, Node]:
        """First return nodes that have come back, then raise the errors of others."""
        for number in self.lost:
            if number not in self._coming:
                self._coming[number] = asyncio.create_task(self._come_back(number))
        assert self._nodes is not None
        back: dict[int, Node] = {}
        for number, task in list(self._coming.items()):
            if task.done() and task.exception() is None:
                back[number] = self._nodes[number] = self._coming.pop(number).result()
        if not back:
            for number, task in list(self._coming.items()):
                if task.done():
                    self._coming.pop(number).result()
        return back

    async def _come_back(self, number: int) -> Node:
        assert self._gate is not None
        self._generation += 1
        agent = self._agents[number] = AgentLink(number, self._generation)
        self._arriving[number] = self._loop.create_future()
        await self._launcher.replace(self._gate.address, self._gate.key, number, agent.key)
        return await self._arrival(number)

    def _enter(self, name: str, end: socket.socket) -> None:
        key, _, what = name.partition("/")
        agent = next((agent for agent in self._agents if agent.key == key), None)
        if agent is None:  # an earlier generation
            end.close()
        elif what:
            host = agent.hosts.get(int(what)) if what.isdecimal() else None
            if host is None or not host.link.connect(end):
                end.close()
        elif agent.link.connect(end):
            agent.live = True
            self._silence.begin(agent.number)
            agent.link.open(
                self._loop,
                lambda report: self._hear(agent, report),
                lambda: self._lose(agent),
                lambda: self._silence.sign(agent.number),
            )
            agent.link.send(Welcome(config=self._config, mark=self._mark))
        else:
            end.close()

    def _hear(self, agent: AgentLink, report: Any) -> None:
        arriving = self._arriving[agent.number]
        match report:
            case Arrived() if not arriving.done():
                agent.name = f"{agent.number} ({report.address})"
                arriving.set_result(report)
            case msg.Died() if not arriving.done():
                arriving.set_exception(ValueError(f"node {agent.name}: {report.fault.text}"))
            case WorkerEnded():
                agent.ended[report.worker] = report.code
            case AgentAlive():
                agent.heard_clock(report.clock)
            case _:
                pass

    def _lose(self, agent: AgentLink) -> None:
        arriving = self._arriving[agent.number]
        if not arriving.done():
            arriving.set_exception(WorkerError(f"node {agent.name} left before its start"))
        agent.lose()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._silence.every_s)
            live = [agent for agent in self._agents if agent.live]
            coming = [n for n, arriving in self._arriving.items() if not arriving.done()]
            for number in self._silence.look([agent.number for agent in live], coming):
                self._agents[number].link.sever()
            for agent in live:
                agent.link.send(msg.Beat())

    def fence(self, stop_at: float | None) -> None:
        """Agents stop workers by themselves, even if the driver is unreachable."""
        for agent in self._agents:
            if agent.live:
                agent.fence(stop_at)

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        allow_files(sum(map(len, specs.values())))
        hosts: dict[int, Host] = {}
        for number, those in specs.items():
            agent = self._agents[number]
            mine = {spec.rank: RemoteHost(spec.rank, agent) for spec in those}
            agent.hosts.update(mine)
            agent.ended.clear()
            hosts.update(mine)
            agent.link.send(Spawn(specs=those, start=self._start))
        return hosts

    def store(self) -> str:
        """Return the address of a store in the driver, which outlives every node."""
        if self._store is None:
            from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

            self._store = TCPStore(self._launcher.host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{self._store.host}:{self._store.port}/"

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for coming in self._coming.values():
            if not coming.cancel():
                coming.exception()  # mark it as read
        for agent in self._agents:
            agent.link.send(msg.Stop())
        until = time.monotonic() + _CLOSE_S
        for agent in self._agents:
            agent.link.drain(max(0.0, until - time.monotonic()))
        if self._gate is not None:
            self._gate.close()
        self._launcher.close()
        self._store = None
