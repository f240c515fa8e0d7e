"""The driver's view of its workers: sockets that close and answers that nobody waits for."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollpacker.runtime.cluster.local import LocalHost
from rollpacker.runtime.cluster.nodes import Nodes
from rollpacker.runtime.ipc.link import Host, Link, Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Breaker, Fault
from rollpacker.runtime.pool.supervisor import Supervisor
from rollpacker.runtime.worker.worker import WorkerSpec
from waiting import soon

SPECS = cast(Mapping[int, Sequence[WorkerSpec]], {0: [SimpleNamespace(rank=0)]})


class Sleeping:
    """What a worker runs in (``Started``): a process that does nothing, and is not in a hurry."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.pid = self.process.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> None:
        try:
            self.process.wait(min(seconds, 0.1))
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        self.process.kill()

    def exit_code(self) -> int | None:
        return self.process.poll()


class Machine:
    """Starts one worker (``Nodes``), whose end of the channel is ``end``."""

    def start(self, _specs: object) -> Mapping[int, Host]:
        ours, theirs = socket.socketpair()
        self.end, self.worker = Wire(theirs), Sleeping()
        return {0: LocalHost(Link(ours), self.worker)}


Talk = Callable[[Supervisor, Machine, list[Any], list[str]], Awaitable[None]]


def with_crew(talk: Talk) -> None:
    """Of one worker that takes part; ``talk`` gets what is heard of it, and how it was lost."""

    async def main() -> None:
        machine, heard, lost = Machine(), list[Any](), list[str]()
        crew = Supervisor(
            cast(Nodes, machine),
            60.0,
            lambda _number, report: heard.append(report),
            lambda _number, how: lost.append(how),
            heard.append,
        )
        try:
            starting = asyncio.create_task(crew.start(SPECS))
            await asyncio.sleep(0)
            machine.end.send(msg.Ready())
            await starting
            crew.admit()
            await talk(crew, machine, heard, lost)
        finally:
            crew.close()
            assert machine.worker.process.poll() is not None

    async def patient() -> None:
        async with asyncio.timeout(60.0):
            await main()

    asyncio.run(patient())


def test_others_are_heard_while_a_process_ends_that_has_closed_its_socket() -> None:
    async def talk(
        _supervisor: Supervisor, machine: Machine, _heard: list[Any], lost: list[str]
    ) -> None:
        machine.end.close()
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not lost
        machine.worker.kill()
        await soon(lambda: lost)
        assert lost == ["worker 0 died: exit code -9"]

    with_crew(talk)


def test_one_that_was_put_down_is_lost_at_once() -> None:
    async def talk(crew: Supervisor, _machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        crew.put_down(0, "it gave no sign of life")
        assert lost == ["worker 0 died: it gave no sign of life"]
        assert not crew.live

    with_crew(talk)


def test_a_mistake_of_the_users_ends_all_that_is_waited_for() -> None:
    """Another worker in its place would come to the same."""

    async def talk(crew: Supervisor, machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        machine.end.send(msg.Died(fault=Fault(kind="user", text="set another key")))
        with pytest.raises(ValueError, match=r"^set another key$"):
            await Breaker().run(asyncio.sleep(60))
        assert not lost
        assert not crew.live

    with_crew(talk)


@pytest.mark.parametrize("asked", [pytest.param(True, marks=pytest.mark.wide), False])
def test_an_answer_that_nobody_waits_for_costs_no_later_report(asked: bool) -> None:
    """Both come at once."""

    async def talk(crew: Supervisor, machine: Machine, heard: list[Any], lost: list[str]) -> None:
        if asked:
            asking = asyncio.create_task(crew.ask([0], msg.Offload()))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        for report in (msg.Done(), msg.Carried(weights=None, start_s=0.0, end_s=0.0)):
            machine.end.send(report)
        await soon(lambda: heard)
        assert isinstance(heard[0], msg.Carried)
        assert crew.live
        assert not lost

    with_crew(talk)


def test_what_workers_note_is_told_once() -> None:
    async def talk(crew: Supervisor, machine: Machine, heard: list[Any], lost: list[str]) -> None:
        for text in ("it takes long", "it takes long", "it is over"):
            machine.end.send(msg.Noted(text=text))
        await soon(lambda: "it is over" in heard)
        assert heard == ["it takes long", "it is over"]
        assert crew.live
        assert not lost

    with_crew(talk)
