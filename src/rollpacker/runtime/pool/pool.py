"""The workers of one run: where their messages go, who listens, who has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, Phase, ReplicaId
from rollpacker.engine.base import EngineInfo, least
from rollpacker.policy.engines.device_split import apart, turns
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.runtime.cluster.nodes import Node, Nodes, ThisMachine
from rollpacker.runtime.ipc.link import encode
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, spawn
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.pool import placement
from rollpacker.runtime.pool.supervisor import Supervisor
from rollpacker.runtime.pool.topology import Listener, Loss, Topology


class WorkerPool:
    """Processes that hold engines, replicas, or parts of them (``placement``).

    An engine's number is that of the first of the smallest engines on its devices; the larger ones
    rest until their devices are put together.

    Args:
        config: the run's.
        max_length: longest response in tokens.
        total_updates: of the whole run.
        sizes: tensor-parallel sizes that engines may have, ascending; default: the configured one.
        nodes: that they run on; default: this machine.
        note: told what the user should know.

    ``infos``, the engines' by size, are known once they have started.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        max_length: int,
        total_updates: int,
        sizes: Sequence[int] = (),
        nodes: Nodes | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._config = config
        self._max_length = max_length
        self._total_updates = total_updates
        self._sizes = sizes or (config.engine.tensor_parallel,)
        self._machines = nodes or ThisMachine(config)
        self._nodes: list[Node] = []
        self._supervisor = Supervisor(
            self._machines, config.cluster.heartbeat_s, self._dispatch, self._lose, note
        )
        self._newcomers: set[int] = set()
        self._generation = 0
        self._topology = Topology()
        self._formed: dict[EngineId, int] = {}
        self._asleep: set[EngineId] = set()
        self._waking: dict[EngineId, list[msg.EngineCommand]] = {}
        """Commands for engines that wake once the replicas beside them are idle."""
        self._summing = Counter[ReplicaId]()
        """Gradient tasks that replicas were sent and have not answered."""
        self._leaving: asyncio.Task[None] | None = None
        self._version = 0
        self._weights: Mapping[int, SharedWeights] | None = None
        self._carriers: tuple[int, ...] = ()
        self._carried_at = ""
        self.infos: dict[int, EngineInfo] = {}
        self.transport = self if apart(config) else None
        self._met: tuple[ReplicaId, ...] = ()
        self._unheard: list[str] = []
        self._nobody = Listener(
            lambda _engine, _report: None,
            lambda _replica, _report: None,
            lambda loss: self._unheard.append(loss.text),
        )
        self._listener = self._nobody

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """The live ones, of the smallest size."""
        return self._topology.decoding(self._supervisor.live)

    @property
    def node_size(self) -> int:
        """Devices of a node that decode; neighbours of so many can be put together."""
        return gcd(*placement.decoding_devices(self._config, self._nodes))

    @property
    def on_gpus(self) -> bool:
        """Whether its devices are GPUs, of this machine or others."""
        return placement.on_gpus(self._nodes)

    @property
    def info(self) -> EngineInfo:
        """What the smallest engines are able to do."""
        return self.infos[self._sizes[0]]

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        return self._topology.whole(self._supervisor.live)

    @property
    def fleet(self) -> Fleet:
        """What is live, by devices."""
        return self._topology.fleet(self._config.devices.layout, self._supervisor.live)

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of this machine's workers, of those that are being started too."""
        return self._supervisor.pids

    def fence(self, stop_at: float | None) -> None:
        """Workers on other nodes may run until then, in monotonic seconds; None: they are idle. A
        time that is over stops them all, as somebody else does here."""
        self._supervisor.frozen = stop_at is not None and stop_at <= time.monotonic()
        self._machines.fence(stop_at)

    async def offload(self, phase: Phase) -> int:
        """Who runs that phase alone leaves the devices; the most bytes that a host has of them."""
        kept = Counter[int]()
        answers = await self._supervisor.ask(self._topology.only(phase), msg.Offload())
        for worker, done in answers.items():
            kept[self._topology.node(worker)] += done.host_bytes
        return max(kept.values(), default=0)

    async def onload(self, phase: Phase) -> None:
        await self._supervisor.ask(self._topology.only(phase), msg.Onload())

    async def start(self) -> None:
        """Start all workers and wait for their models.

        Raises ``ValueError`` for the user's mistakes (a wrong model), ``WorkerError`` otherwise.
        """
        self._nodes = [*await self._machines.gather()]
        slots = self._slots()
        self._topology = Topology(slots)
        await self._begin(slots, self._topology.workers)
        self._supervisor.admit()
        self.meet()

    def _slots(self) -> list[placement.ProcessSlot]:
        """Who is where; processes of different calls never meet."""
        self._generation += 1
        return placement.lay_out(
            self._config, self._nodes, self._sizes, self._store(), self._generation
        )

    async def _begin(self, slots: Sequence[placement.ProcessSlot], which: Collection[int]) -> None:
        """Start some workers and wait for their models; engines are taken for what the least of
        them is able to do."""
        for turn in placement.in_turns(self._config, slots):
            specs = placement.worker_specs(
                self._config, slots, self._max_length, self._total_updates
            )
            chosen = {
                node: [spec for spec in those if spec.rank in which and spec.rank in turn]
                for node, those in specs.items()
            }
            some = {node: those for node, those in chosen.items() if those}
            for ready in await self._supervisor.start(some) if some else ():
                assert isinstance(ready, msg.Ready)
                if (info := ready.info) is not None:
                    size = info.tensor_parallel[0]
                    self.infos[size] = least(self.infos.get(size, info), info)

    def regain(self) -> None:
        """Bring back nodes that are gone; those that have come are there for ``start_again``.

        Raises as ``Nodes.regain`` does.
        """
        for number, node in self._machines.regain().items():
            self._nodes[number] = node

    def lost(self) -> set[int]:
        """Workers that are gone and can be started: others wait for a node."""
        gone = self._topology.workers - self._supervisor.live
        absent = {n for n in gone if self._topology.node(n) in self._machines.lost}
        for part in self._topology.replicas.values():
            if absent & {*part}:
                absent |= {*part}
        return gone - absent

    async def start_again(self, workers: Collection[int]) -> None:
        """Start these anew, and wait for their models. Raises as ``start`` does.

        Replicas that leave their devices to engines are built there first, so engines leave them.
        """
        if not self._leaves:
            await self._begin(self._slots(), workers)
            return
        await self.offload("rollout")
        try:
            await self._begin(self._slots(), workers)
        finally:
            await self.onload("rollout")

    def admit(self) -> tuple[tuple[EngineId, ...], tuple[ReplicaId, ...]]:
        """Those that were started again take part; the engines and replicas that are back, whose
        weights are not those of the others.

        Raises ``WorkerError`` when one has gone meanwhile.
        """
        engines, replicas = {*self.engines}, {*self.replicas}
        self._newcomers = self._supervisor.admit()
        return (
            tuple(engine for engine in self.engines if engine not in engines),
            tuple(replica for replica in self.replicas if replica not in replicas),
        )

    def give_up(self) -> None:
        """Those that were admitted last cannot take part after all."""
        self._supervisor.dismiss(self._newcomers, "it was given up")
        self._topology.forget(self._newcomers)
        self._newcomers = set()

    def _store(self) -> str:
        """Where workers of several nodes meet; empty where there is one node only."""
        return self._machines.store() if len(self._nodes) > 1 else ""

    def _name(self, node: int) -> str:
        """Of what the run has on a node."""
        return self._nodes[node].folder.name

    @contextlib.contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Tell this one, and nobody else, while the context lasts."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def unheard(self) -> list[str]:
        """What was lost while nobody listened, since the last call."""
        texts, self._unheard[:] = list(self._unheard), []
        return texts

    def meet(self) -> None:
        """Let the live replicas form process groups, the lowest id first, if one has died: each of
        the workers that hold the same part of the weights."""
        if self._met == self.replicas:
            return
        self._met = self.replicas
        place = self._meeting()
        for rank, replica in enumerate(self._met):
            for part, number in enumerate(self._topology.replicas[replica]):
                reform = msg.Reform(rank=rank, world=len(self._met), rendezvous=f"{place}-{part}")
                self._supervisor.send(number, reform)

    def _meeting(self) -> str:
        """A place where workers of any nodes have never met."""
        self._generation += 1
        name = f"{self._name(0)}-{self._generation}"
        return f"{self._store() or f'{self._nodes[0].folder}/'}{name}"

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        """Send a command; a dead worker is noticed by its closed channel, not here.

        An engine that sleeps is woken for its first requests, after the gradients beside it: the
        two do not fit into a device's memory.
        """
        size = self._formed.get(engine, self._sizes[0])
        if isinstance(command, msg.Sleep):
            self._asleep.add(engine)
        elif isinstance(command, msg.Submit) and engine in self._asleep:
            self._asleep.discard(engine)
            self._waking[engine] = []
        if engine in self._waking:
            self._waking[engine].append(command)
            self._wake()
        else:
            self._lead(size, engine, command)

    def _wake(self) -> None:
        """Load engines whose devices no replica computes on, then send their commands."""
        beside = self.fleet.on if self._waking else {}
        for engine in [*self._waking]:
            if not any(self._summing[replica] for replica in beside.get(engine, ())):
                commands, size = self._waking.pop(engine), self._formed.get(engine, self._sizes[0])
                self._load(size, engine)
                for command in commands:
                    self._lead(size, engine, command)

    def _lead(self, size: int, engine: EngineId, command: msg.EngineCommand) -> None:
        self._supervisor.send(self._topology.engines[size, engine][0], command)

    def share(self) -> ReplicaId:
        """Let a replica share its weights with engines of other processes; which one."""
        if not self.replicas:
            raise WorkerError("no replica is left that has the weights")
        replica = self.replicas[0]
        self.to_replica(replica, msg.Share(name=f"{self._name(self.home(replica))}-weights"))
        return replica

    def home(self, replica: ReplicaId) -> int:
        """The node of a replica's lead, which shares its weights there."""
        return self._topology.node(self._topology.replicas[replica][0])

    def node(self, engine: EngineId) -> int:
        """That an engine is on."""
        return self._topology.node(self._topology.engines[self._sizes[0], engine][0])

    def carry(self, replica: ReplicaId, size: int) -> Sequence[EngineId]:
        """Bring weights of so many bytes, that a replica shares, to the other nodes: an engine of
        each receives them."""
        sender = self._topology.replicas[replica][0]
        first = {self.node(engine): engine for engine in reversed(self.engines)}
        receivers = [engine for node, engine in first.items() if node != self.home(replica)]
        workers = [self._topology.engines[self._sizes[0], engine][0] for engine in receivers]
        if not workers:
            return ()
        if self._carriers != (sender, *workers):
            self._carriers, self._carried_at = (sender, *workers), self._meeting()
        for rank, worker in enumerate(self._carriers):
            command = msg.Carry(
                meeting=self._carried_at,
                rank=rank,
                world=len(self._carriers),
                size=size,
                name=f"{self._name(self._topology.node(worker))}-weights",
            )
            self._supervisor.send(worker, command)
        return receivers

    def part(self) -> None:
        """Those that carried weights together have failed: they will meet anew."""
        self._carriers = ()

    def abandon(self, kept: Sequence[int], why: str) -> None:
        """Go on with the engines of these nodes only; the others' loss is reported."""
        for number in sorted(self._supervisor.live):
            if self._topology.decodes(number) and self._topology.node(number) not in kept:
                self._supervisor.put_down(number, why)

    def load_weights(self, version: int, weights: Mapping[int, SharedWeights] | None) -> None:
        """Tell all engines of the smallest size, and any that is formed later, to take these."""
        self._version, self._weights = version, weights
        self._asleep.clear()
        self._waking.clear()
        for engine in self.engines:
            self._load(self._sizes[0], engine)

    def _load(self, size: int, engine: EngineId) -> None:
        weights = None if self._weights is None else self._weights[self.node(engine)]
        self._lead(size, engine, msg.LoadWeights(version=self._version, weights=weights))

    def form(self, engine: EngineId, members: Sequence[EngineId]) -> None:
        """Put the devices of ``members``, which hold nothing, together into one engine."""
        for member in members:
            self.to_engine(member, msg.Sleep())
            self._formed.pop(member, None)
        self._asleep -= {*members}
        self._formed[engine] = size = len(members) * self._sizes[0]
        self._load(size, engine)

    def disband(self) -> dict[EngineId, int]:
        """Back to the smallest engines; those that were formed, told to sleep, by size."""
        formed, self._formed = self._formed, {}
        for engine, size in formed.items():
            self._lead(size, engine, msg.Sleep())
        return formed

    def to_replica(self, replica: ReplicaId, command: msg.ReplicaCommand) -> None:
        """Send a command; a dead worker is noticed by its closed channel, not here."""
        self._summing[replica] += isinstance(command, msg.Accumulate)
        lead, *others = self._topology.replicas[replica]
        if not others:
            self._supervisor.send(lead, command)
            return
        data = encode(command)
        for number in (lead, *others):
            self._supervisor.send_encoded(number, data)

    async def ask(self, command: msg.Save | msg.Load, replicas: Sequence[ReplicaId]) -> None:
        """Send a command and wait until it is done.

        Raises ``ValueError`` for the user's mistakes, ``OSError`` and ``WorkerError`` otherwise.
        """
        if not replicas or not set(replicas) <= set(self.replicas):
            raise WorkerError("a worker died before it could be asked")
        workers = [n for r in replicas for n in self._topology.replicas[r]]
        if self._leaves:  # for that its state comes back to the devices
            await self.offload("rollout")
        answers = self._supervisor.expect(workers)
        for worker in workers:
            self._supervisor.send(worker, command)
        try:
            answered = await asyncio.gather(*answers)
        finally:
            if self._leaves:
                await self.offload("train")
                await self.onload("rollout")
        for done in answered:
            assert isinstance(done, msg.Done)
            if done.fault is not None:
                raise done.fault.error()

    @property
    def takes_turns(self) -> bool:
        """Whether engines and replicas have a device's memory one after the other."""
        return turns(self._config, gpus=self.on_gpus) != "off"

    @property
    def _leaves(self) -> bool:
        """Whether the trainer's state waits in the machine's memory while engines decode."""
        return turns(self._config, gpus=self.on_gpus) == "both"

    def leave(self, then: Callable[[], None]) -> None:
        """Let replicas leave the devices, where they take turns on these, and go on."""

        async def go_on() -> None:
            await self.offload("train")
            then()

        if self._leaves:
            self._leaving = spawn(go_on())
        else:
            then()

    def _dispatch(self, number: int, report: msg.Report) -> None:
        match report:
            case msg.Finished() | msg.Aborted() | msg.Failed() | msg.WeightsLoaded() | msg.Slept():
                self._listener.engine(self._topology.engine(number), report)
            case msg.Carried() if self._topology.decodes(number):
                self._listener.engine(self._topology.engine(number), report)
            case msg.Carried():
                self._listener.replica(self._topology.replica(number), report)
            case msg.Accumulated() | msg.ScoredSamples() | msg.Applied() | msg.Shared():
                of_all = self._topology.hear(number, self._timed(number, report))
                if of_all is not None:
                    self._heard(self._topology.replica(number), of_all)
            case _:
                raise AssertionError(report)

    def _heard(self, replica: ReplicaId, report: msg.ReplicaReport) -> None:
        if isinstance(report, msg.Accumulated):
            self._summing[replica] -= 1
            self._wake()
        self._listener.replica(replica, report)

    def _timed(self, number: int, report: msg.ReplicaReport) -> msg.ReplicaReport:
        """With times of the driver's clock: it took as long, and ended when it was heard."""
        if not self._nodes[self._topology.node(number)].elsewhere:
            return report
        now = time.monotonic()
        return replace(report, start_s=now - (report.end_s - report.start_s), end_s=now)

    def _lose(self, number: int, text: str) -> None:
        """A worker is gone, and others are of no use without it."""
        formed = [(size, engine) for engine, size in self._formed.items()]
        workers, engines, replicas = self._topology.without(number, formed)
        self._supervisor.dismiss(workers, text)
        self._topology.forget(workers)
        if workers & {*self._carriers}:
            self.part()
        if replicas:
            self._met = ()
        for engine in engines:
            self._formed.pop(engine, None)
            self._waking.pop(engine, None)
        for replica in replicas:
            self._summing.pop(replica, None)
        self._wake()
        self._listener.lost(Loss(engines=engines, replicas=replicas, text=text))

    def close(self) -> None:
        """Stop all workers; those that do not listen are killed."""
        self._supervisor.close()
        self._machines.close()
