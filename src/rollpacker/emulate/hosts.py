"""Processes of emulated workers, many in each, for whoever starts them: a driver or an agent."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from rollpacker.emulate.config import Emulated
from rollpacker.emulate.worker import End, Orders, main
from rollpacker.processes.children import shielded
from rollpacker.runtime.worker.worker import WorkerSpec


class EmulatedWorker:
    """One worker, among others in its process, which ends with the last of them.

    Args:
        process: that it is in.
        living: workers of this process that have not been ended, this one among them.
        number: its own.
    """

    def __init__(self, process: BaseProcess, living: set[int], number: int) -> None:
        self._process = process
        self._living = living
        self._number = number

        self.pid = process.pid
        self.sentinel = process.sentinel
        self.join = process.join

    @property
    def exitcode(self) -> int | None:
        """The process's own; a worker that was ended alone died of that."""
        return self._process.exitcode if self._number in self._living else -signal.SIGKILL

    def kill(self) -> None:
        """Give it up; the process sees that its socket is closed, and dies with the last one."""
        self._living.discard(self._number)
        if not self._living:
            self._process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEmulated:
    """Starts emulated workers of one node (``Start``); neighbours share a process.

    Args:
        emulated: the devices.
        vocabulary: token ids that responses may have.
    """

    emulated: Emulated
    vocabulary: int

    def __call__(
        self, specs: Sequence[WorkerSpec], ends: Sequence[socket.socket]
    ) -> list[EmulatedWorker]:
        """In the order of ``specs``."""
        parts: dict[int, list[int]] = {}
        for place, process in enumerate(_shared_out(specs, self.emulated.config.processes)):
            parts.setdefault(process, []).append(place)
        started: dict[int, EmulatedWorker] = {}
        for number, places in sorted(parts.items()):
            orders = Orders(
                specs=[specs[place] for place in places],
                emulated=self.emulated,
                vocabulary=self.vocabulary,
            )
            process = _start(number, orders, [ends[place] for place in places])
            living = {*places}
            started |= {place: EmulatedWorker(process, living, place) for place in places}
        return [started[place] for place in range(len(specs))]


def _start(number: int, orders: Orders, ends: Sequence[socket.socket]) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    theirs = [End(end) for end in ends]
    name = f"emulated-{number}"
    process = context.Process(target=main, args=(theirs, orders), name=name, daemon=True)
    with shielded():
        process.start()
    return process


def _shared_out(specs: Sequence[WorkerSpec], processes: int) -> list[int]:
    """The process of each worker, of so many."""
    units: dict[bool, list[int]] = {}
    for spec in specs:
        units.setdefault(_alone(spec), []).append(_unit(spec))
    shares: list[int] = []
    for spec in specs:
        mine = units[_alone(spec)]
        first, last = min(mine), max(mine)
        shares.append((_unit(spec) - first) * processes // (last - first + 1))
    return shares


def _alone(spec: WorkerSpec) -> bool:
    """Replicas that are separate from engines have numbers of their own."""
    return spec.engine is None and spec.config.devices.layout == "separate"


def _unit(spec: WorkerSpec) -> int:
    """Workers of one engine, or of one replica, are neighbours."""
    if spec.engine is not None:
        return spec.engine.engine
    assert spec.replica is not None
    return spec.replica.replica
