"""The workers of one run: their processes, messages, listener and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from msgspec.structs import replace

from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, Phase, ReplicaId
from rollpacker.engine.base import EngineInfo, least
from rollpacker.policy.engines.device_split import apart, turns
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.runtime.cluster.nodes import Node, Nodes, ThisMachine
from rollpacker.runtime.ipc.failure_detector import Silence
from rollpacker.runtime.ipc.link import Host, encode
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, spawn
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.pool import placement
from rollpacker.runtime.pool.placement import ProcessSlot, Topology
from rollpacker.runtime.worker.worker import WorkerSpec

_CLOSE_S = 3.0
"""Seconds for workers to leave after ``Stop``."""
_GONE_S = 60.0
"""Seconds until a killed worker and its device memory are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Lost engines and replicas, and the reason."""

    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]
    text: str

    def __str__(self) -> str:
        gone = [*(f"engine {n}" for n in self.engines), *(f"replica {n}" for n in self.replicas)]
        return f"{self.text}; lost: {', '.join(gone)}" if gone else self.text


@dataclass(frozen=True, slots=True)
class Listener:
    """Takes reports and losses. Its functions must not wait."""

    engine: Callable[[EngineId, msg.EngineReport], None]
    replica: Callable[[ReplicaId, msg.ReplicaReport], None]
    lost: Callable[[Loss], None]


class WorkerPool:
    """Processes that hold engines, replicas, or parts of them (``placement``).

    An engine has the number of the first smallest engine on its devices. Larger engines rest until
    their devices are joined.

    Args:
        max_length: longest response in tokens.
        sizes: tensor-parallel sizes of engines, ascending. Default: the configured one.
        nodes: default: this machine.
        note: gets lines for the user, each text once.

    ``infos`` has the engines' properties by size after the start.
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
        self.outgoing: Callable[[Any], Any] = lambda command: command
        """Changes commands to workers, as an emulation does."""
        self.beat: Callable[[msg.Beat], None] = lambda _sign: None
        self._note = note
        self._noted: set[str] = set()
        self._nodes: list[Node] = []
        # Processes, by the numbers of their workers.
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(config.cluster.heartbeat_s)
        self._watching: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._hosts: dict[int, Host] = {}
        self._live: set[int] = set()
        """Workers that take part."""
        self._coming: set[int] = set()
        self._starting: set[int] = set()
        self._newcomers: set[int] = set()
        self._answers: dict[int, asyncio.Future[msg.Report]] = {}
        self._reasons: dict[int, str] = {}
        self._last_words: dict[int, str] = {}
        self._spoiled = ""
        self._frozen = False
        """Workers are stopped, so they need not give signs of life."""
        # Engines and replicas.
        self._generation = 0
        self._topology = Topology()
        self._parts: dict[int, deque[msg.ReplicaReport]] = defaultdict(deque)
        """Reports of replicas' ranks whose other ranks have not reported yet."""
        self._formed: dict[EngineId, int] = {}
        self._asleep: set[EngineId] = set()
        self._waking: dict[EngineId, list[msg.EngineCommand]] = {}
        """Commands for engines that wake when the replicas beside them are idle."""
        self._summing = Counter[ReplicaId]()
        """Unanswered gradient tasks of replicas."""
        self._leaving: asyncio.Task[None] | None = None
        self._version = 0
        self._weights: Mapping[int, SharedWeights] | None = None
        self._carriers: tuple[int, ...] = ()
        self._carried_at = ""
        self.infos: dict[int, EngineInfo] = {}
        self.transport = self if apart(config) else None
        self._met: tuple[ReplicaId, ...] = ()
        self._unheard: list[str] = []
        self._listener = Listener(
            lambda _engine, _report: None,
            lambda _replica, _report: None,
            lambda loss: self._unheard.append(loss.text),
        )

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """The live engines of the smallest size."""
        return self._topology.decoding(self._live)

    @property
    def node_size(self) -> int:
        """The largest number of neighbours that can be joined on each node."""
        return gcd(*placement.decoding_devices(self._config, self._nodes))

    @property
    def on_gpus(self) -> bool:
        return placement.on_gpus(self._nodes)

    @property
    def info(self) -> EngineInfo:
        return self.infos[self._sizes[0]]

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        return self._topology.whole(self._live)

    @property
    def fleet(self) -> Fleet:
        return self._topology.fleet(self._config.devices.layout, self._live)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of this machine's workers, also of those that are starting."""
        pids = (self._hosts[number].pid for number in sorted(self._live | self._coming))
        return tuple(pid for pid in pids if pid)

    def fence(self, stop_at: float | None) -> None:
        """Let workers on other nodes run until ``stop_at`` (monotonic seconds). None: they are
        idle. A time in the past stops them."""
        self._frozen = stop_at is not None and stop_at <= time.monotonic()
        self._machines.fence(stop_at)

    async def offload(self, phase: Phase) -> int:
        """Move workers of that phase alone to host memory. Returns the most bytes on a node."""
        kept = Counter[int]()
        for worker, done in (await self._ask(phase, msg.Offload())).items():
            kept[self._topology.node(worker)] += done.host_bytes
        return max(kept.values(), default=0)

    async def onload(self, phase: Phase) -> None:
        await self._ask(phase, msg.Onload())

    async def _ask(self, phase: Phase, command: msg.Offload | msg.Onload) -> dict[int, msg.Done]:
        """Answers of live workers of that phase alone. The listener gets the losses of others."""
        asked = [worker for worker in self._topology.only(phase) if worker in self._live]
        answers = self._expect(asked)
        self._send(asked, command)
        found = await asyncio.gather(*answers, return_exceptions=True)
        pairs = zip(asked, found, strict=True)
        return {worker: done for worker, done in pairs if isinstance(done, msg.Done)}

    async def start(self) -> None:
        """Start all workers and wait for their models. Raises ``ValueError`` for the user's
        mistakes (a wrong model), ``WorkerError`` otherwise."""
        self._nodes = [*await self._machines.gather()]
        slots = self._slots()
        self._topology = Topology(slots)
        await self._begin(slots, range(len(slots)))
        self.admit()
        self.meet()

    def _slots(self) -> list[ProcessSlot]:
        """Lay out all processes. Processes of different calls never meet."""
        self._generation += 1
        return placement.lay_out(
            self._config, self._nodes, self._sizes, self._store(), self._generation
        )

    async def _begin(self, slots: Sequence[ProcessSlot], which: Collection[int]) -> None:
        """Start some workers and wait. A size of engines has its least capable one's properties."""
        for turn in placement.in_turns(self._config, slots):
            specs = placement.worker_specs(
                self._config,
                slots,
                turn & {*which},
                max_length=self._max_length,
                total_updates=self._total_updates,
            )
            for ready in await self._launch(specs) if specs else ():
                assert isinstance(ready, msg.Ready)
                if (info := ready.info) is not None:
                    size = info.tensor_parallel[0]
                    self.infos[size] = least(self.infos.get(size, info), info)

    async def _launch(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> list[msg.Report]:
        """Start workers, given by node, and wait for their models. If one fails, all are ended."""
        if not self._coming:
            self._spoiled = ""
        ranks = [spec.rank for those in specs.values() for spec in those]
        before = [self._hosts[rank] for rank in ranks if rank in self._hosts]
        for host in before:  # remains of a former process
            host.kill()
        # Its device memory is free after its end.
        await asyncio.gather(*(host.end(_GONE_S) for host in before))
        started = self._machines.start(specs)
        for number, host in started.items():
            self._hosts[number] = host
            self._reasons.pop(number, None)
            self._last_words.pop(number, None)
            self._silence.begin(number)
            self._listen_to(number, host)
        self._coming |= {*started}
        self._starting |= {*started}
        if self._watching is None:
            self._watching = spawn(self._watch())
        try:
            return await asyncio.gather(*self._expect([*started]))
        except BaseException:
            self._dismiss(self._coming, "another one of those that were started with it has failed")
            raise

    def _listen_to(self, number: int, host: Host) -> None:
        host.link.open(
            self._loop,
            lambda report: self._dispatch(number, report),
            lambda: self._gone(number, host),
            lambda: self._silence.sign(number),
        )

    def regain(self) -> None:
        """Bring back lost nodes for ``start_again``. Raises as ``Nodes.regain`` does."""
        for number, node in self._machines.regain().items():
            self._nodes[number] = node

    def lost(self) -> set[int]:
        """Dead workers that can start now. Workers of a lost node wait, and so do all ranks of a
        replica with such a rank."""
        gone = {*range(len(self._topology.slots))} - self._live
        absent = {n for n in gone if self._topology.node(n) in self._machines.lost}
        for part in self._topology.replicas.values():
            if absent & {*part}:
                absent |= {*part}
        return gone - absent

    async def start_again(self, workers: Collection[int]) -> None:
        """Restart workers and wait for their models. Raises as ``start`` does. A replica that
        shares its devices in turn is built on them, so engines leave them first."""
        if not self._leaves:
            await self._begin(self._slots(), workers)
            return
        await self.offload("rollout")
        try:
            await self._begin(self._slots(), workers)
        finally:
            await self.onload("rollout")

    def admit(self) -> tuple[tuple[EngineId, ...], tuple[ReplicaId, ...]]:
        """Let started workers take part. Returns the new engines and replicas, which lack the
        current weights. Raises ``WorkerError`` and ends all if one has died."""
        if self._spoiled:
            raise WorkerError(self._spoiled)
        engines, replicas = {*self.engines}, {*self.replicas}
        self._newcomers, self._coming = self._coming, set()
        self._live |= self._newcomers
        return (
            tuple(engine for engine in self.engines if engine not in engines),
            tuple(replica for replica in self.replicas if replica not in replicas),
        )

    def give_up(self) -> None:
        self._dismiss(self._newcomers, "it was given up")
        self._newcomers = set()

    def _store(self) -> str:
        """The address at which workers of several nodes meet. Empty for one node."""
        return self._machines.store() if len(self._nodes) > 1 else ""

    def _name(self, node: int) -> str:
        return self._nodes[node].folder.name

    @contextlib.contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def unheard(self) -> list[str]:
        texts, self._unheard[:] = list(self._unheard), []
        return texts

    def meet(self) -> None:
        """After a loss, let live replicas form new process groups, lowest id first. Ranks with the
        same part of the weights form a group."""
        if self._met == self.replicas:
            return
        self._met = self.replicas
        place = self._meeting()
        for rank, replica in enumerate(self._met):
            for part, number in enumerate(self._topology.replicas[replica]):
                reform = msg.Reform(rank=rank, world=len(self._met), rendezvous=f"{place}-{part}")
                self._send([number], reform)

    def _meeting(self) -> str:
        self._generation += 1
        name = f"{self._name(0)}-{self._generation}"
        return f"{self._store() or f'{self._nodes[0].folder}/'}{name}"

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        """Send a command. A dead worker is found by its closed channel, not here. A sleeping engine
        wakes for its first requests, after the gradients beside it, as both do not fit into
        memory."""
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
        self._send(self._topology.engines[size, engine][:1], command)

    def share(self) -> ReplicaId:
        """Let a replica share its weights with engines of other processes, and return which one."""
        if not self.replicas:
            raise WorkerError("no replica is left that has the weights")
        replica = self.replicas[0]
        self.to_replica(replica, msg.Share(name=f"{self._name(self.home(replica))}-weights"))
        return replica

    def home(self, replica: ReplicaId) -> int:
        return self._topology.node(self._topology.replicas[replica][0])

    def node(self, engine: EngineId) -> int:
        return self._topology.node(self._topology.engines[self._sizes[0], engine][0])

    def carry(self, replica: ReplicaId, size: int) -> Sequence[EngineId]:
        """Bring a replica's ``size`` bytes of weights to other nodes. Returns their receivers."""
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
            self._send([worker], command)
        return receivers

    def part(self) -> None:
        """Use a new meeting next time, as carrying the weights has failed."""
        self._carriers = ()

    def abandon(self, kept: Sequence[int], why: str) -> None:
        """Keep only the engines of these nodes. The loss of the others is reported."""
        for number in sorted(self._live):
            slot = self._topology.slots[number]
            if slot.engine is not None and slot.device.node not in kept:
                self._put_down(number, why)

    def load_weights(self, version: int, weights: Mapping[int, SharedWeights] | None) -> None:
        """Let all smallest engines load these weights, and later every formed engine."""
        self._version, self._weights = version, weights
        self._asleep.clear()
        self._waking.clear()
        for engine in self.engines:
            self._load(self._sizes[0], engine)

    def _load(self, size: int, engine: EngineId) -> None:
        weights = None if self._weights is None else self._weights[self.node(engine)]
        self._lead(size, engine, msg.LoadWeights(version=self._version, weights=weights))

    def form(self, engine: EngineId, members: Sequence[EngineId]) -> None:
        """Join the devices of ``members``, which must hold nothing, to one engine."""
        for member in members:
            self.to_engine(member, msg.Sleep())
            self._formed.pop(member, None)
        self._asleep -= {*members}
        self._formed[engine] = size = len(members) * self._sizes[0]
        self._load(size, engine)

    def disband(self) -> dict[EngineId, int]:
        """Return to the smallest engines. Returns the formed ones that go to sleep, by size."""
        formed, self._formed = self._formed, {}
        for engine, size in formed.items():
            self._lead(size, engine, msg.Sleep())
        return formed

    def to_replica(self, replica: ReplicaId, command: msg.ReplicaCommand) -> None:
        self._summing[replica] += isinstance(command, msg.Accumulate)
        self._send(self._topology.replicas[replica], command)

    def _send(self, workers: Iterable[int], command: msg.Command) -> None:
        live = [number for number in workers if number in self._live]
        data = encode(self.outgoing(command)) if live else memoryview(b"")
        for number in live:
            self._hosts[number].link.send_encoded(data)

    def _expect(self, workers: Iterable[int]) -> list[asyncio.Future[msg.Report]]:
        answers = {worker: self._loop.create_future() for worker in workers}
        self._answers.update(answers)
        return [*answers.values()]

    async def ask(self, command: msg.Save | msg.Load, replicas: Sequence[ReplicaId]) -> None:
        """Send a command and wait until it is done. Raises ``ValueError`` for the user's mistakes,
        ``OSError`` and ``WorkerError`` otherwise."""
        if not replicas or not set(replicas) <= set(self.replicas):
            raise WorkerError("a worker died before it could be asked")
        workers = [n for r in replicas for n in self._topology.replicas[r]]
        if self._leaves:  # the command brings the trainer's state back to the devices
            await self.offload("rollout")
        answers = self._expect(workers)
        self._send(workers, command)
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
        """Whether engines and replicas use a device's memory in turn."""
        return turns(self._config, gpus=self.on_gpus) != "off"

    @property
    def _leaves(self) -> bool:
        """Whether the trainer's state is in host memory while engines decode."""
        return turns(self._config, gpus=self.on_gpus) == "both"

    def leave(self, then: Callable[[], None]) -> None:
        """Call ``then`` after replicas have left the devices, if they take turns on them."""

        async def go_on() -> None:
            await self.offload("train")
            then()

        if self._leaves:
            self._leaving = spawn(go_on())
        else:
            then()

    # What workers say, and how they end ----------------------------------------------------------

    def _dispatch(self, number: int, report: msg.Report) -> None:
        match report:
            case msg.Ready() | msg.Done():
                self._starting.discard(number)
                answer = self._answers.pop(number, None)
                if answer is not None and not answer.done():  # it may be cancelled
                    answer.set_result(report)
            case msg.Died(fault=fault) if fault.kind == "user":
                self._forget(number, fault.text, fault.error())
            case msg.Died():
                # A collective breaks when one of its ranks is killed. A survivor's report of that
                # must not come before the news of the killed rank.
                self._last_words[number] = report.fault.text
                self._wait_for_end(number, self._hosts[number])
            case msg.Beat():
                self._silence.work(number, report.at, report.done, report.longest_s)
                self.beat(report)
            case msg.Noted():
                if report.text not in self._noted:
                    self._noted.add(report.text)
                    self._note(report.text)
            case msg.Accumulated() | msg.ScoredSamples() | msg.Applied() | msg.Shared():
                self._hear_replica(number, self._timed(number, report))
            case msg.Carried() if self._topology.slots[number].engine is None:
                self._listener.replica(self._topology.replica(number), report)
            case _:
                self._listener.engine(self._topology.engine(number), report)

    def _hear_replica(self, number: int, report: msg.ReplicaReport) -> None:
        """Pass on a replica's report when all ranks have sent theirs: rank 0's numbers, from the
        first start to the last end."""
        replica = self._topology.replica(number)
        part = self._topology.replicas[replica]
        if len(part) > 1:
            self._parts[number].append(report)
            if not all(self._parts[member] for member in part):
                return
            sent = [self._parts[member].popleft() for member in part]
            began, ended = min(each.start_s for each in sent), max(each.end_s for each in sent)
            report = replace(sent[0], start_s=began, end_s=ended)
        if isinstance(report, msg.Accumulated):
            self._summing[replica] -= 1
            self._wake()
        self._listener.replica(replica, report)

    def _timed(self, number: int, report: msg.ReplicaReport) -> msg.ReplicaReport:
        """Convert times to the driver's clock. The end is now, and the duration stays."""
        if not self._nodes[self._topology.node(number)].elsewhere:
            return report
        now = time.monotonic()
        return replace(report, start_s=now - (report.end_s - report.start_s), end_s=now)

    async def _watch(self) -> None:
        """Kill workers that are silent or hang. Their closed links are reported as losses."""
        while True:
            await asyncio.sleep(self._silence.every_s)
            if self._frozen:
                for number in self._live | self._coming:
                    self._silence.begin(number)
                continue
            lost = self._silence.look(self._live | self._coming, self._starting)
            for number, why in lost.items():
                self._put_down(number, why)

    def _put_down(self, number: int, why: str) -> None:
        if number in self._live | self._coming:
            self._reasons[number] = why
            self._hosts[number].kill()

    def _gone(self, number: int, host: Host) -> None:
        """Its link has closed. The reason may take some seconds to know."""
        if number in self._reasons:
            self._forget(number, self._reasons[number])
        else:
            self._wait_for_end(number, host)

    def _wait_for_end(self, number: int, host: Host) -> None:
        asking = spawn(self._ask_end(number, host))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _ask_end(self, number: int, host: Host) -> None:
        end = await host.end()
        if self._hosts[number] is host and number in self._live | self._coming:
            why = self._reasons.get(number) or self._last_words.get(number, end)
            self._forget(number, why)

    def _forget(self, number: int, why: str, user: Exception | None = None) -> None:
        lived = number in self._live
        self._leave(number)
        text = f"worker {number} died: {why}"
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(user or WorkerError(text))
        if lived and user is not None:
            raise user  # a restarted worker would fail the same, so end the awaited work
        if lived:
            self._lose(number, text)
        else:
            self._spoiled = text
            self._dismiss(self._coming, text)

    def _lose(self, number: int, text: str) -> None:
        """Report a lost worker, and end the others that are useless without it."""
        formed = [(size, engine) for engine, size in self._formed.items()]
        workers, engines, replicas = self._topology.without(number, formed)
        self._dismiss(workers, text)
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

    def _dismiss(self, numbers: Collection[int], why: str) -> None:
        """Kill workers. If one of them is starting, kill all that are starting. Only callers that
        await their answers are informed."""
        chosen = {*numbers}
        if chosen & self._coming:
            self._spoiled = why
            chosen |= self._coming
        for number in sorted(chosen & (self._live | self._coming)):
            self._leave(number).kill()
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():  # it may be cancelled
                answer.set_exception(WorkerError(why))

    def _leave(self, number: int) -> Host:
        """Stop listening to a worker, and drop its reports that wait for other ranks."""
        for some in (self._live, self._coming, self._starting):
            some.discard(number)
        self._parts.pop(number, None)
        host = self._hosts[number]
        host.link.close()
        return host

    def close(self) -> None:
        for task in self._asking | ({self._watching} if self._watching else set()):
            task.cancel()
        try:
            for number in self._live | self._coming:
                self._hosts[number].link.send(msg.Stop())
                self._hosts[number].link.close()
            until = time.monotonic() + _CLOSE_S
            for host in self._hosts.values():
                host.wait(max(0.0, until - time.monotonic()))
        finally:
            for host in self._hosts.values():
                host.kill()
            for host in self._hosts.values():
                host.wait(_GONE_S)
        self._live.clear()
        self._coming.clear()
        self._machines.close()
