"""When a silent worker is taken for dead, in time that only a test's loop has."""

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollpacker.config import RunConfig, parse
from rollpacker.engine.base import EngineInfo
from rollpacker.runtime.cluster.nodes import Node, ThisMachine
from rollpacker.runtime.ipc.link import Link, Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import Listener, WorkerPool

BEAT_S = 2.0


class Skipping(selectors.DefaultSelector):
    """Does not wait: what a loop would wait for nothing is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            self.now += timeout or 0.0
        return found


class Loop(asyncio.SelectorEventLoop):
    """Time passes only where nothing is to be done."""

    def __init__(self) -> None:
        self.clock = Skipping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Script:
    """A host whose worker lives in the test's loop."""

    pid = 0

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        ours, theirs = socket.socketpair()
        self.link, self.worker = Link(ours), Wire(theirs)
        self.killed: float | None = None

    def ready(self) -> None:
        """Its engine is built."""
        info = EngineInfo(
            kv_tokens=64,
            max_length=64,
            tensor_parallel=(1,),
            latency={1: 1.0},
            prefill_token_s=0.0,
            exact_seeds=True,
        )
        self.worker.send(msg.Ready(info=info))

    async def beat(self, phase_s: float, times: int) -> float:
        """As a worker does, but so often only; when the last one was."""
        await asyncio.sleep(phase_s)
        for _ in range(times - 1):
            self.worker.send(msg.Beat())
            await asyncio.sleep(BEAT_S)
        self.worker.send(msg.Beat())
        return self._loop.time()

    def wait(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        if self.killed is None:
            self.killed = self._loop.time()
            self.worker.close()

    def end(self) -> str:
        return "killed"


class Alone(ThisMachine):
    """One node, whose only worker is scripted."""

    def __init__(self, host: Script) -> None:
        self._host = host

    async def gather(self) -> list[Node]:
        return [Node(number=0, places=(("cpu", ()),), folder=Path("/meeting"))]

    def start(self, specs: object) -> dict[int, Script]:
        assert specs
        return {0: self._host}

    def close(self) -> None:
        pass


def config() -> RunConfig:
    tree = {
        "output": "run",
        "model": {"path": "nothing"},
        "data": {"path": "rows.jsonl"},
        "rewards": [{"function": "math"}],
        "devices": {"kind": "cpu", "per_node": 1},
        "cluster": {"heartbeat_s": BEAT_S},
    }
    return parse(tree, source="test")


def ignore(_who: int, _report: object) -> None:
    pass


def run(main: Coroutine[Any, Any, None], loop: Loop) -> None:
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


@pytest.mark.parametrize("phase", [0.0, 0.125, 0.25, 0.5, 0.625, 0.875])
@pytest.mark.parametrize("beats", [1, 7])
def test_silence_is_noticed_after_two_to_three_heartbeats(phase: float, beats: int) -> None:
    loop = Loop()
    host = Script(loop)

    async def main() -> None:
        host.ready()
        pool = WorkerPool(config(), max_length=8, total_updates=1, nodes=Alone(host))
        await pool.start()
        last = await host.beat(phase * BEAT_S, beats)
        lost: asyncio.Future[str] = loop.create_future()
        with pool.listen(Listener(ignore, ignore, lambda loss: lost.set_result(loss.text))):
            assert await lost == "worker 0 died: it gave no sign of life"
        assert host.killed is not None
        assert 2.0 <= (host.killed - last) / BEAT_S <= 2.5
        pool.close()

    run(main(), loop)


def test_a_driver_that_stood_still_takes_nobody_for_dead() -> None:
    loop = Loop()
    host = Script(loop)

    async def main() -> None:
        host.ready()
        pool = WorkerPool(config(), max_length=8, total_updates=1, nodes=Alone(host))
        await pool.start()
        for _ in range(3):
            await host.beat(0.0, 2)
            loop.clock.now += 100 * BEAT_S
        await host.beat(0.0, 2)
        assert host.killed is None
        assert pool.engines == (0,)
        pool.close()

    run(main(), loop)


@pytest.mark.parametrize("built_s", [0.0, 175.0])
def test_one_that_is_being_built_may_be_silent_for_three_minutes(built_s: float) -> None:
    loop = Loop()
    host = Script(loop)

    async def main() -> None:
        pool = WorkerPool(config(), max_length=8, total_updates=1, nodes=Alone(host))
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(built_s)
        assert host.killed is None
        if built_s:
            host.ready()
            await starting
            await host.beat(0.0, 2)
        else:
            with pytest.raises(WorkerError, match="worker 0 died: it gave no sign of life"):
                await starting
            assert host.killed == 180.0
        pool.close()

    run(main(), loop)


def test_one_that_says_that_it_lives_may_be_built_for_long() -> None:
    loop = Loop()
    host = Script(loop)

    async def main() -> None:
        pool = WorkerPool(config(), max_length=8, total_updates=1, nodes=Alone(host))
        starting = asyncio.create_task(pool.start())
        await host.beat(0.0, 300)
        assert host.killed is None
        host.ready()
        await starting
        pool.close()

    run(main(), loop)


def at(done: int, longest_s: float | None = 0.02, at: str = "a decode step") -> msg.Beat:
    return msg.Beat(at=at, done=done, longest_s=longest_s)


@pytest.mark.parametrize(
    ("beats", "patience_s"),
    [
        pytest.param(lambda n: at(min(n, 7)), 180.0 + 7 * BEAT_S, id="one that hangs"),
        pytest.param(lambda n: at(0, 30.0), 300.0, id="after long steps"),
        pytest.param(lambda n: at(0, None), 1800.0, id="the first of its kind"),
        pytest.param(lambda n: at(n), None, id="one that goes on"),
        pytest.param(lambda n: at(3, 0.02, ""), None, id="one that waits"),
        pytest.param(lambda n: at(3, 1.0, "ab"[n % 2]), None, id="one that changes its work"),
    ],
)
def test_work_that_does_not_end_is_noticed_whatever_its_heartbeat(
    beats: Callable[[int], msg.Beat], patience_s: float | None
) -> None:
    """Patience is ten times what such work has ever taken, three minutes at the least."""
    loop = Loop()
    host = Script(loop)

    async def main() -> None:
        host.ready()
        pool = WorkerPool(config(), max_length=8, total_updates=1, nodes=Alone(host))
        await pool.start()
        losses: list[str] = []
        with pool.listen(Listener(ignore, ignore, lambda loss: losses.append(loss.text))):
            for count in range(1000):
                if losses:
                    break
                host.worker.send(beats(count))
                await asyncio.sleep(BEAT_S)
        if patience_s is None:
            assert not losses
        else:
            assert losses[0].startswith("worker 0 died: it hangs: a decode step has not ended for")
            assert host.killed is not None
            assert 0.0 <= host.killed - patience_s <= 2 * BEAT_S
        pool.close()

    run(main(), loop)
