"""The workers of one run: where their messages go, who listens, who has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.base import EngineInfo
from rollpacker.policy.division import apart
from rollpacker.policy.fleet import Fleet
from rollpacker.runtime import messages as msg
from rollpacker.runtime.channel import Host
from rollpacker.runtime.devices import worker_devices
from rollpacker.runtime.faults import Fault, WorkerError
from rollpacker.runtime.gangs import Gangs
from rollpacker.runtime.leftovers import Belongings
from rollpacker.runtime.pipes import start_local
from rollpacker.runtime.placement import lay_out
from rollpacker.runtime.protocols import Listener, Loss
from rollpacker.runtime.shared_weights import SharedWeights
from rollpacker.runtime.worker import WorkerSpec

_CLOSE_S = 3.0
"""In which workers should have left; what they do then is of no use to anybody."""
_LOOKS = 2
"""In each heartbeat."""
_MISSED = 4
"""Looks in a row that find no sign of life of a worker that is taken for dead: it has been silent
for more than two heartbeats and at most two and a half."""


class WorkerPool:
    """Processes that hold engines, replicas, or parts of them (``placement``).

    An engine's number is that of the first of the smallest engines on its devices; the larger ones
    rest until their devices are put together.

    Args:
        config: the run's.
        max_length: longest response in tokens.
        total_updates: of the whole run.
        sizes: tensor-parallel sizes that engines may have, ascending; default: the configured one.
        start: starts a host for each worker.

    ``infos``, the engines' by size, are known once they have started.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        max_length: int,
        total_updates: int,
        sizes: Sequence[int] = (),
        start: Callable[[Sequence[WorkerSpec]], Sequence[Host]] = start_local,
    ) -> None:
        self._config = config
        self._max_length = max_length
        self._total_updates = total_updates
        self._sizes = sizes or (config.engine.tensor_parallel,)
        self._start = start
        self._hosts: dict[int, Host] = {}
        self._live: dict[int, Host] = {}
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[msg.Report]] = {}
        self._belongings = Belongings()
        self._generation = 0
        self._gangs = Gangs()
        self._formed: dict[EngineId, int] = {}
        self._weights = msg.LoadWeights(version=0)
        self.infos: dict[int, EngineInfo] = {}
        self.apart = apart(config)
        self._met: tuple[ReplicaId, ...] = ()
        self._heard: set[int] = set()
        self._missed: dict[int, int] = {}
        self._watching: asyncio.Task[None] | None = None
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
        return self._gangs.decoding(self._live)

    @property
    def info(self) -> EngineInfo:
        """What the smallest engines are able to do."""
        return self.infos[self._sizes[0]]

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The live ones."""
        return self._gangs.whole(self._live)

    @property
    def fleet(self) -> Fleet:
        """What is live, by devices."""
        return self._gangs.fleet(self._config.devices.layout, self._live)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the live workers."""
        return tuple(host.pid for host in self._live.values())

    async def start(self) -> None:
        """Start all workers and wait for their models.

        Raises ``ValueError`` for the user's mistakes (a wrong model), ``WorkerError`` otherwise.
        """
        self._hosts = dict(enumerate(self._start(self._specs())))
        self._live = dict(self._hosts)
        for number, host in self._live.items():
            self._loop.add_reader(host.channel.fileno(), self._read, number)
        for ready in await asyncio.gather(*self._expect(tuple(self._live)).values()):
            assert isinstance(ready, msg.Ready)
            if ready.info is not None:
                self.infos.setdefault(ready.info.tensor_parallel[0], ready.info)
        self.meet()
        self._watching = asyncio.create_task(self._watch(self._config.cluster.heartbeat_s))

    def _specs(self) -> list[WorkerSpec]:
        places, folder = worker_devices(self._config), self._belongings.folder
        posts = lay_out(self._config, places, self._sizes, folder)
        self._gangs = Gangs(posts)
        return [
            WorkerSpec(
                config=self._config,
                rank=rank,
                cores=post.place[1],
                device=post.place[0],
                max_length=self._max_length,
                total_updates=self._total_updates,
                engine=post.engine,
                replica=post.replica,
            )
            for rank, post in enumerate(posts)
        ]

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
        self._generation += 1
        place = str(self._belongings.folder / f"generation-{self._generation}")
        for rank, replica in enumerate(self._met):
            for part, number in enumerate(self._gangs.replicas[replica]):
                rendezvous = f"{place}-{part}"
                world = len(self._met)
                self._send(number, msg.Reform(rank=rank, world=world, rendezvous=rendezvous))

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        """Send a command; a dead worker is noticed by its closed channel, not here."""
        self._lead(self._formed.get(engine, self._sizes[0]), engine, command)

    def _lead(self, size: int, engine: EngineId, command: msg.EngineCommand) -> None:
        self._send(self._gangs.engines[size, engine][0], command)

    def share(self) -> ReplicaId:
        """Let a replica share its weights with engines of other processes; which one."""
        replica = self.replicas[0]
        self.to_replica(replica, msg.Share(prefix=f"{self._belongings.name}-weights-"))
        return replica

    def load_weights(self, version: int, weights: SharedWeights | None) -> None:
        """Tell all engines of the smallest size, and any that is formed later, to take these."""
        self._weights = msg.LoadWeights(version=version, weights=weights)
        for engine in self.engines:
            self.to_engine(engine, self._weights)

    def form(self, engine: EngineId, members: Sequence[EngineId]) -> None:
        """Put the devices of ``members``, which hold nothing, together into one engine."""
        for member in members:
            self.to_engine(member, msg.Sleep())
            self._formed.pop(member, None)
        self._formed[engine] = len(members) * self._sizes[0]
        self.to_engine(engine, self._weights)

    def disband(self) -> dict[EngineId, int]:
        """Back to the smallest engines; those that were formed, told to sleep, by size."""
        formed, self._formed = self._formed, {}
        for engine, size in formed.items():
            self._lead(size, engine, msg.Sleep())
        return formed

    def to_replica(self, replica: ReplicaId, command: msg.ReplicaCommand) -> None:
        """Send a command; a dead worker is noticed by its closed channel, not here."""
        for number in self._gangs.replicas[replica]:
            self._send(number, command)

    def _send(self, number: int, command: msg.Command) -> None:
        host = self._live.get(number)
        if host is not None:
            try:
                host.channel.send(command)
            except BlockingIOError:
                self._give_up(number)
            except (BrokenPipeError, ConnectionResetError):
                pass  # its end is read

    async def ask(self, command: msg.Save | msg.Load, replicas: Sequence[ReplicaId]) -> None:
        """Send a command and wait until it is done.

        Raises ``ValueError`` for the user's mistakes, ``OSError`` and ``WorkerError`` otherwise.
        """
        if not replicas or not set(replicas) <= set(self.replicas):
            raise WorkerError("a worker died before it could be asked")
        answers = self._expect([n for r in replicas for n in self._gangs.replicas[r]])
        for replica in replicas:
            self.to_replica(replica, command)
        for done in await asyncio.gather(*answers.values()):
            assert isinstance(done, msg.Done)
            if done.fault is not None:
                raise done.fault.error()

    def _expect(self, workers: Sequence[int]) -> dict[int, asyncio.Future[msg.Report]]:
        answers = {worker: self._loop.create_future() for worker in workers}
        self._answers.update(answers)
        return answers

    def _read(self, number: int) -> None:
        self._heard.add(number)
        try:
            # One message a call: asking for more costs as much as being called again.
            report = self._live[number].channel.recv()
        except BlockingIOError:
            self._give_up(number)
        except (EOFError, OSError):  # the latter within a message
            self._forget(number, None)
        else:
            self._dispatch(number, report)

    def _dispatch(self, number: int, report: msg.Report) -> None:
        match report:
            case msg.Finished() | msg.Aborted() | msg.Failed() | msg.WeightsLoaded() | msg.Slept():
                self._listener.engine(self._gangs.engine(number), report)
            case msg.Accumulated() | msg.Scored() | msg.Applied() | msg.Shared():
                of_all = self._gangs.hear(number, report)
                if of_all is not None:
                    self._listener.replica(self._gangs.replica(number), of_all)
            case msg.Ready() | msg.Done():
                self._answers.pop(number).set_result(report)
            case msg.Died():
                self._forget(number, report.fault)
            case msg.Beat():
                pass

    async def _watch(self, every_s: float) -> None:
        """Kill whoever has stopped to give signs of life: its channel closes, and that is told.

        What counts is how often this task saw none, not time: it stands still with the driver.
        """
        while True:
            await asyncio.sleep(every_s / _LOOKS)
            for number in list(self._live):
                missed = 0 if number in self._heard else self._missed.get(number, 0) + 1
                self._missed[number] = missed
                if missed >= _MISSED:
                    self._give_up(number)
            self._heard.clear()

    def _give_up(self, number: int) -> None:
        """A worker gives no sign of life: its channel closes, and that is read."""
        self._missed[number] = _MISSED
        self._heard.discard(number)
        self._live[number].kill()

    def _forget(self, number: int, fault: Fault | None) -> None:
        host = self._leave(number)
        end = host.end()
        silent = self._missed.get(number, 0) >= _MISSED
        why = fault.text if fault else "it gave no sign of life" if silent else end
        text = f"worker {number} died: {why}"
        waiting = self._answers.pop(number, None)
        if waiting is not None:
            user = fault is not None and fault.kind == "user"
            waiting.set_exception(fault.error() if fault and user else WorkerError(text))
        formed = [(size, engine) for engine, size in self._formed.items()]
        workers, engines, replicas = self._gangs.without(number, formed)
        for member in sorted(workers & self._live.keys()):
            self._leave(member).kill()
            if (answer := self._answers.pop(member, None)) is not None:
                answer.set_exception(WorkerError(text))
        for engine in engines:
            self._formed.pop(engine, None)
        self._listener.lost(Loss(engines=engines, replicas=replicas, text=text))

    def _leave(self, number: int) -> Host:
        """Listen to a worker no more."""
        host = self._live.pop(number)
        self._loop.remove_reader(host.channel.fileno())
        host.channel.close()
        return host

    def close(self) -> None:
        """Stop all workers; those that do not listen are killed."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            for number, host in self._live.items():
                self._send(number, msg.Stop())
                self._loop.remove_reader(host.channel.fileno())
            until = time.monotonic() + _CLOSE_S
            for host in self._hosts.values():
                host.wait(max(0.0, until - time.monotonic()))
        finally:
            for host in self._hosts.values():
                host.kill()
        for host in self._live.values():
            host.channel.close()
        self._live.clear()
        self._belongings.remove()
