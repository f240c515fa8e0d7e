"""A run's agent on a node of a cluster: it starts workers there, and ends them.

``python -m rollpacker.runtime.cluster.agent HOST PORT NAME`` reads the run's key as the first line
of its standard input, which stays open while the agent is needed. The agent opens the workers'
connections to the driver, so that no worker knows the key.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import psutil

from rollpacker.processes.children import allow_files, shielded
from rollpacker.runtime.cluster import cluster as node
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.cluster.nodes import StartedWorker
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.ipc.rendezvous import enter
from rollpacker.runtime.ipc.watchdog_client import Watchdog
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.messages.shared_weights import SharedMemoryOwner
from rollpacker.runtime.worker.worker import Heartbeat

_FENCE = 30
"""After so many heartbeats without a message, the driver is considered gone and the workers
unreachable. Otherwise they would hold their devices for ever."""
_CLOSE_S = 3.0
"""Seconds for workers to leave after ``Stop``."""
_GONE_S = 60.0
"""Seconds until a killed worker and its device memory are gone."""


class Agent:
    """Serves one driver."""

    def __init__(self, address: tuple[str, int], key: bytes, name: str) -> None:
        self._address, self._key, self._name = address, key, name
        self._end = enter(address, key, name)
        self._driver = Wire(self._end)
        self._say: Callable[[Any], None] = self._driver.send
        self._memory = SharedMemoryOwner()
        self._workers: dict[int, StartedWorker] = {}
        self._guard: Watchdog | None = None

    def serve(self, leave: int) -> None:
        """Serve until ``Stop``, the driver's end, or the end of the descriptor ``leave``. Raises
        ``OSError`` or ``EOFError`` if the driver is gone."""
        try:
            if leave in wait([self._end, leave]):
                return
            welcome = self._driver.recv()
            assert isinstance(welcome, node.Welcome)
            if not self._arrive(welcome):
                return
            heartbeat_s = welcome.config.cluster.heartbeat_s
            heartbeat = Heartbeat(
                self._driver, heartbeat_s, lambda: node.AgentAlive(clock=time.monotonic())
            )
            self._say = heartbeat.send
            try:
                self._watch(leave, _FENCE * heartbeat_s)
            finally:
                heartbeat.stopped.set()
        finally:
            for worker in self._workers.values():
                worker.kill()
            for worker in self._workers.values():
                worker.join(_GONE_S)
            if self._guard is not None:
                self._guard.dismiss()
            self._memory.remove()

    def _arrive(self, welcome: node.Welcome) -> bool:
        """Report this node's devices. False if the node cannot take part."""
        try:
            places = tuple(worker_devices(welcome.config))
            file, held = welcome.mark
            if not file.is_file() or file.read_text() != held:
                raise ValueError(
                    f"{file.parent} is not the run's there: 'output' must be on a disk that all "
                    "nodes see"
                )
        except ValueError as error:
            self._driver.send(msg.Died(fault=Fault(kind="user", text=str(error))))
            return False
        folder, address = str(self._memory.folder), self._end.getsockname()[0]
        _talk_over(address)
        self._driver.send(node.Arrived(places=places, folder=folder, address=address))
        self._driver.send(node.AgentAlive(clock=time.monotonic()))
        return True

    def _watch(self, leave: int, fence_s: float) -> None:
        heard = time.monotonic()
        while True:
            # Each ended worker is reported and joined once.
            living = {rank: w.sentinel for rank, w in self._workers.items()}
            ready = wait([self._end, leave, *{*living.values()}], fence_s)
            if leave in ready:
                return
            now = time.monotonic()
            # Report ended workers before new ones take their ranks.
            for rank in [rank for rank, sentinel in living.items() if sentinel in ready]:
                code = self._workers.pop(rank).exitcode
                self._say(node.WorkerEnded(worker=rank, code=code))
            if self._end in ready:
                heard = now
                if not self._obey(self._driver.recv()):
                    return
            if now - heard > fence_s:
                raise EOFError

    def _obey(self, command: Any) -> bool:
        match command:
            case node.Spawn():
                self._spawn(command)
            case node.Kill():
                if (worker := self._workers.get(command.worker)) is not None:
                    worker.kill()
                    worker.join(_GONE_S)  # before another worker gets its devices
            case node.Until():
                self._fence(command.stop_at)
            case msg.Stop():
                self._leave()
                return False
            case _:
                pass  # a heartbeat
        return True

    def _fence(self, stop_at: float | None) -> None:
        """Let workers run until ``stop_at``, even if this process or the driver stops."""
        self._guard = self._guard or Watchdog()
        self._guard.tell([worker.pid or 0 for worker in self._workers.values()], stop_at)

    def _spawn(self, command: node.Spawn) -> None:
        ranks = [spec.rank for spec in command.specs]
        allow_files(len(ranks))
        ends = [enter(self._address, self._key, f"{self._name}/{rank}") for rank in ranks]
        self._workers |= zip(ranks, command.start(command.specs, ends), strict=True)
        for end in ends:
            end.close()

    def _leave(self) -> None:
        until = time.monotonic() + _CLOSE_S
        for worker in self._workers.values():
            worker.join(max(0.0, until - time.monotonic()))


def _talk_over(address: str) -> None:
    """Let gloo and NCCL in workers, which inherit this, use the interface to the driver."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def main() -> None:
    """Entry point of the process."""
    host, port, name = sys.argv[1:]
    key = bytes.fromhex(sys.stdin.readline())
    with shielded(), suppress(EOFError, OSError):
        Agent((host, int(port)), key, name).serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
