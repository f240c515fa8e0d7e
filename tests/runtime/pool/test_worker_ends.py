"""The driver's view of its workers: sockets that close and answers that nobody waits for."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from rollpacker.config import parse
from rollpacker.core.types import ReplicaId
from rollpacker.runtime.cluster.nodes import LocalHost, Node, Nodes
from rollpacker.runtime.ipc.link import Host, Link, Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Breaker, Fault
from rollpacker.runtime.pool.pool import Listener, WorkerPool
from waiting import soon

CONFIG = parse(
    {
        "output": "run",
        "model": {"path": "nothing"},
        "data": {"path": "rows.jsonl"},
        "rewards": [{"function": "math"}],
        "devices": {"kind": "cpu", "per_node": 1},
    },
    source="test",
)


class Sleeping(subprocess.Popen[bytes]):
    """What a worker runs in (``StartedWorker``): a process that is not in a hurry."""

    sentinel = 0

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(min(seconds, 0.1))


class Machine:
    """Starts workers (``Nodes``), whose ends of their channels are ``ends``.

    The first worker and its end are ``worker`` and ``end``.
    """

    def __init__(self, size: int) -> None:
        self.ends, self.workers, self._size = list[Wire](), list[Sleeping](), size

    async def gather(self) -> Sequence[Node]:
        return [Node(number=0, places=(("cpu", ()),) * self._size, folder=Path("/meeting"))]

    def start(self, _specs: object) -> Mapping[int, Host]:
        hosts = dict[int, Host]()
        for number in range(self._size):
            ours, theirs = socket.socketpair()
            self.ends.append(Wire(theirs))
            self.workers.append(Sleeping(["sleep", "600"]))
            hosts[number] = LocalHost(Link(ours), self.workers[number])
        self.end, self.worker = self.ends[0], self.workers[0]
        return hosts

    def close(self) -> None:
        pass


Talk = Callable[[WorkerPool, Machine, list[Any], list[str]], Awaitable[None]]


def with_pool(talk: Talk, workers: int = 1) -> None:
    """Run ``talk`` with a pool of live workers, the reports it hears, and the texts of losses."""

    async def main() -> None:
        machine, heard, lost = Machine(workers), list[Any](), list[str]()
        nodes, note = cast(Nodes, machine), heard.append
        config = CONFIG.model_copy(
            update={"devices": CONFIG.devices.model_copy(update={"per_node": workers})}
        )
        pool = WorkerPool(config, max_length=9, total_updates=1, nodes=nodes, note=note)
        listener = Listener(
            lambda _engine, report: heard.append(report),
            lambda _replica, report: heard.append(report),
            lambda loss: lost.append(loss.text),
        )
        try:
            starting = asyncio.create_task(pool.start())
            while not pool.pids:
                await asyncio.sleep(0)
            for end in machine.ends:
                end.send(msg.Ready())
            await starting
            with pool.listen(listener):
                await talk(pool, machine, heard, lost)
        finally:
            pool.close()
            assert all(worker.poll() is not None for worker in machine.workers)

    async def patient() -> None:
        async with asyncio.timeout(60.0):
            await main()

    asyncio.run(patient())


def test_others_are_heard_while_a_process_ends_that_has_closed_its_socket() -> None:
    async def talk(_pool: WorkerPool, machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        machine.end.close()
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not lost
        machine.worker.kill()
        await soon(lambda: lost)
        assert lost == ["worker 0 died: exit code -9"]

    with_pool(talk)


def test_one_that_was_put_down_is_lost_at_once() -> None:
    async def talk(pool: WorkerPool, _machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        pool._put_down(0, "it gave no sign of life")
        assert lost == ["worker 0 died: it gave no sign of life"]
        assert not pool.engines

    with_pool(talk)


def test_a_mistake_of_the_users_ends_all_that_is_waited_for() -> None:
    """Another worker in its place would come to the same."""

    async def talk(pool: WorkerPool, machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        machine.end.send(msg.Died(fault=Fault(kind="user", text="set another key")))
        with pytest.raises(ValueError, match=r"^set another key$"):
            await Breaker().run(asyncio.sleep(60))
        assert not lost
        assert not pool.engines

    with_pool(talk)


def test_a_killed_worker_is_reported_before_the_survivor_whose_collective_it_broke() -> None:
    async def talk(_pool: WorkerPool, machine: Machine, _heard: list[Any], lost: list[str]) -> None:
        machine.end.send(msg.Died(fault=Fault(kind="crash", text="Connection closed by peer")))
        await asyncio.sleep(0.05)
        machine.workers[1].kill()
        machine.ends[1].close()
        await soon(lambda: lost)
        assert lost == ["worker 1 died: exit code -9"]
        machine.worker.kill()
        await soon(lambda: len(lost) == 2)
        assert lost[1] == "worker 0 died: Connection closed by peer"

    with_pool(talk, workers=2)


@pytest.mark.parametrize("asked", [pytest.param(True, marks=pytest.mark.wide), False])
def test_an_answer_that_nobody_waits_for_costs_no_later_report(asked: bool) -> None:
    """Both come at once."""

    async def talk(pool: WorkerPool, machine: Machine, heard: list[Any], lost: list[str]) -> None:
        if asked:
            asking = asyncio.create_task(pool.ask(msg.Save(folder="kept"), [ReplicaId(0)]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        for report in (msg.Done(), msg.Carried(weights=None, start_s=0.0, end_s=0.0)):
            machine.end.send(report)
        await soon(lambda: heard)
        assert isinstance(heard[0], msg.Carried)
        assert pool.engines
        assert not lost

    with_pool(talk)


def test_what_workers_note_is_told_once() -> None:
    async def talk(pool: WorkerPool, machine: Machine, heard: list[Any], lost: list[str]) -> None:
        for text in ("it takes long", "it takes long", "it is over"):
            machine.end.send(msg.Noted(text=text))
        await soon(lambda: "it is over" in heard)
        assert heard == ["it takes long", "it is over"]
        assert pool.engines
        assert not lost

    with_pool(talk)
