"""The entry point of a process of emulated workers, and its loop."""

from __future__ import annotations

import contextlib
import pickle
import selectors
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from rollpacker.emulate.agenda import WallAgenda
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.messages import Punctual
from rollpacker.emulate.worker.responses import EmulatedResponses
from rollpacker.emulate.worker.workers import NO_WEIGHTS, EmulatedEngine, EmulatedReplica
from rollpacker.processes.children import shielded
from rollpacker.runtime.ipc.channel import WorkerChannel
from rollpacker.runtime.ipc.wire import Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.worker.worker import WorkerSpec
from rollpacker.sim.world.worker import SimWorker

_SHORT = 1 << 12
"""Bytes of a message that may be for a worker that carries out none but ``Stop``."""
_UNREAD = msg.Proceed()
_ROUNDS = 8
"""Parts of a heartbeat; in each a part of the workers gives its sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a process of emulated workers is given.

    Args:
        specs: its workers'.
        emulated: the devices.
        vocabulary: token ids that responses may have.
    """

    specs: Sequence[WorkerSpec]
    emulated: Emulated
    vocabulary: int


def main(ends: Sequence[End], orders: Orders) -> None:
    """Serve until all drivers' ends are closed, or told to stop."""
    with shielded():
        try:
            Process(ends, orders).serve()
        except ValueError as error:
            _die(ends, Fault(kind="user", text=str(error)))
        except Exception:
            _die(ends, Fault(kind="crash", text=traceback.format_exc()))


def _die(ends: Sequence[WorkerChannel], fault: Fault) -> None:
    """None of the workers can go on."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.send(msg.Died(fault=fault))


class End(Wire):
    """A worker's end of its channel."""

    def skim(self) -> Any:
        """Wait for the next message; one that is long is not unpacked."""
        data = self.message()
        return pickle.loads(data) if len(data) <= _SHORT else _UNREAD


class CommandInbox:
    """Messages of all workers with the time at which they came; None where an end is closed.

    Always reading: two processes that both write into full sockets would wait for ever.

    Args:
        ends: the workers'.
        silent: those that carry out no command: others of their engine or replica do.
    """

    def __init__(self, ends: Sequence[End], silent: Collection[int]) -> None:
        self._ends = ends
        self._silent = silent
        self._queue: SimpleQueue[tuple[float, int, msg.Command | None]] = SimpleQueue()
        Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, end in enumerate(self._ends):
                selector.register(end.fileno(), selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    command = self._receive(key.data)
                    if command is None or isinstance(command, msg.Stop):
                        selector.unregister(key.fd)
                    self._queue.put((time.monotonic(), key.data, command))

    def _receive(self, worker: int) -> msg.Command | None:
        try:
            end = self._ends[worker]
            return end.skim() if worker in self._silent else end.recv()
        except (EOFError, OSError):
            return None

    def get(self, timeout_s: float) -> tuple[float, int, msg.Command | None] | None:
        """The next one; None when none comes in time."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except Empty:
            return None


class Process:
    """Emulated workers, one channel each, on one agenda.

    Args:
        ends: to the driver.
        orders: which workers they are.
    """

    def __init__(self, ends: Sequence[End], orders: Orders) -> None:
        self.emulated = orders.emulated
        self.agenda = WallAgenda(orders.emulated.config.factor)
        specs = orders.specs
        self.responses = EmulatedResponses(orders.emulated, specs[0].max_length, orders.vocabulary)
        self._orders = orders
        self._ends: dict[int, WorkerChannel] = dict(enumerate(ends))
        self._touched: dict[int, SimWorker] = {}
        sizes = [spec.engine.span.size for spec in specs if spec.engine is not None]
        self._size = min(sizes, default=1)
        self._engines: list[EmulatedEngine] = []
        self._commands: list[dict[type, Callable[[Any], None]]] = [{} for _ in specs]
        self._build(specs)
        self._inbox = CommandInbox(ends, {w for w in self._ends if not self._commands[w]})
        self._beat_s = specs[0].config.cluster.heartbeat_s / _ROUNDS
        self._beats: deque[int] = deque(self._ends)
        self._next_beat = time.monotonic() + self._beat_s

    def _build(self, specs: Sequence[WorkerSpec]) -> None:
        members: dict[int, list[int]] = {}
        for worker, spec in enumerate(specs):
            engine = None
            if spec.engine is not None and spec.engine.span.rank == 0:
                engine = EmulatedEngine(self, spec.engine, self._size, self._sender([worker]))
                self._engines.append(engine)
                self._commands[worker] |= engine.commands
            if spec.replica is None:
                info = None if engine is None else engine.info()
                self._send([worker], msg.Ready(info=info))
                continue
            part = members.setdefault(spec.replica.replica, [])
            part.append(worker)
            if len(part) == 1:
                replica = EmulatedReplica(self, spec.replica, self._sender(part), engine)
                self._commands[worker] |= replica.commands
            self._send([worker], msg.Ready(info=None if engine is None else engine.info()))
        for worker, commands in enumerate(self._commands):
            if commands:
                commands[msg.Carry] = partial(self._carry, worker)

    def _carry(self, worker: int, _command: msg.Carry) -> None:
        """To another node, at once as within one."""
        now = self.agenda.clock_s(self.agenda.now)
        self._send([worker], msg.Carried(weights=NO_WEIGHTS, start_s=now, end_s=now))

    def _sender(self, workers: Sequence[int]) -> Any:
        return lambda report: self._send(workers, report)

    def _send(self, workers: Sequence[int], report: msg.Report) -> None:
        for worker in workers:
            end = self._ends.get(worker)
            if end is not None:
                if isinstance(report, msg.WeightsLoaded) and worker == next(iter(self._ends)):
                    self._beat(worker)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    end.send(report)

    def _beat(self, worker: int) -> None:
        late = Punctual(process=self._orders.specs[0].rank, lateness=self.agenda.lateness)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._ends[worker].send(late)

    def touch(self, worker: SimWorker) -> None:
        """It has changed: it plans anew when this instant is over."""
        if not self._touched:
            self.agenda.after(0.0, self._settle)
        self._touched[id(worker)] = worker

    def _settle(self) -> None:
        touched, self._touched = self._touched, {}
        for worker in touched.values():
            worker.settle()

    def overlapping(self, engine: EmulatedEngine) -> list[EmulatedEngine]:
        """Other engines on the same devices."""
        return [
            other
            for other in self._engines
            if other is not engine
            and other.covers.start < engine.covers.stop
            and engine.covers.start < other.covers.stop
        ]

    def serve(self) -> None:
        """Until every worker has left."""
        while self._ends:
            self._take(min(self.agenda.wait_s(), self._next_beat - time.monotonic()))
            self.agenda.run_due()
            if time.monotonic() >= self._next_beat:
                self._next_beat += self._beat_s
                for _ in range(-(-len(self._beats) // _ROUNDS)):
                    self._give_sign()

    def _give_sign(self) -> None:
        worker = self._beats.popleft()
        if worker in self._ends:
            self._beats.append(worker)
            self._beat(worker)

    def _take(self, timeout_s: float) -> None:
        """What has come, each at its time."""
        arrived = self._inbox.get(timeout_s)
        while arrived is not None:
            at, worker, command = arrived
            if command is None or isinstance(command, msg.Stop):
                self._leave(worker)
            else:
                when = self.agenda.of(at)
                self.agenda.at(when, lambda w=worker, c=command: self._do(w, c))
            arrived = self._inbox.get(0.0)

    def _do(self, worker: int, command: msg.Command) -> None:
        act = self._commands[worker].get(type(command))
        if act is not None and worker in self._ends:
            act(command)

    def _leave(self, worker: int) -> None:
        end = self._ends.pop(worker, None)
        if end is not None:
            end.close()
