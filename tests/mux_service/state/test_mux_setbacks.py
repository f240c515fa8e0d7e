"""A scheduler that fails, at a request or as time passes: the rest of the daemon goes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.scheduler import scheduler
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.commands.writer import Answer, Command, Writer
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store

SPEC = {"worst_rollout_s": 10.0, "worst_train_s": 10.0, "slo": 100.0}


def test_an_event_that_the_scheduler_fails_on_is_left_out(tmp_path: Path) -> None:
    """The rest of its batch is kept; the scheduler is built again without it."""

    def submit(name: str) -> Command:
        asked, body = bodies.Post(name, name), bodies.NewJob(id=name, **SPEC)
        return lambda core: commands.once(core, asked, lambda: commands.submit(core, asked, body))

    def poison(core: TransactionLog) -> Answer:
        core.record(ev.PermitRequested(job="nobody", phase="rollout"))
        return Answer(200, {})

    async def batch() -> list[object]:
        writer = Writer(
            lambda: TransactionLog(Store(tmp_path / "mux.sqlite"), None, 10.0), commands.poll
        )
        calls = [submit("a"), poison, submit("b"), submit("c")]
        tasks = [asyncio.ensure_future(writer.call(call)) for call in calls]
        loop = asyncio.get_running_loop()
        writer._loop = loop
        await asyncio.sleep(0)
        writer.start(loop)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(writer.stop)
        assert writer.stats.poisoned == 1
        return list(found)

    found = asyncio.run(batch())
    assert [isinstance(each, Answer) for each in found] == [True, False, True, True]
    assert isinstance(found[1], Refused)
    assert found[1].status == 500
    store = Store(tmp_path / "mux.sqlite")
    kept = [entry.key for entry in store.entries()]
    store.close()
    assert kept == ["a", "b", "c"]


class Failing:
    """A daemon's writer with a clock that the test turns, whose scheduler fails on some events."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.opened = 1000.0, 0
        self._file = folder / "mux.sqlite"
        self._monkeypatch = monkeypatch
        self.writer = Writer(self._open, commands.poll)

    def _open(self) -> TransactionLog:
        self.opened += 1
        return TransactionLog(Store(self._file), None, 10.0, lambda: self.time)

    def on(self, kind: type[ev.Event]) -> None:
        def fail(*_: object) -> None:
            raise KeyError("of the scheduler")

        self._monkeypatch.setitem(scheduler._HANDLERS, kind, fail)

    async def looks(self) -> None:
        """The writer comes by."""
        await self.writer.read(lambda _core: None)

    async def until(self, seconds: float) -> None:
        """Time passes until then, second by second."""
        while self.time < 1000.0 + seconds:
            self.time += 1.0
            await self.looks()


@asynccontextmanager
async def failing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Failing]:
    world = Failing(folder, monkeypatch)
    world.writer.start(asyncio.get_running_loop())
    try:
        yield world
    finally:
        await asyncio.to_thread(world.writer.stop)


def permitted(core: TransactionLog, job: str) -> int:
    """The token of a new job's first permit."""
    alone = bodies.NewJob(id=job, **SPEC | {"slo": 1.0})
    first, second = bodies.Post(f"{job}/1", ""), bodies.Post(f"{job}/2", "")
    commands.once(core, first, lambda: commands.submit(core, first, alone))
    commands.once(core, second, lambda: commands.permit(core, second, job, bodies.Ask("rollout")))
    token = core.leased.jobs[job].token
    assert token is not None
    return token


def test_a_scheduler_that_fails_as_time_passes_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the log again and again, and gave every lease its full time each time."""

    async def main() -> None:
        async with failing(tmp_path, monkeypatch) as world:
            writer = world.writer
            token = await writer.read(lambda core: permitted(core, "a"))
            due = await writer.read(lambda core: core.leased.leases[token].deadline)
            monkeypatch.setattr(scheduler.Scheduler, "next_look", lambda _: 0.0)
            world.on(ev.TimePassed)
            await world.until(5.0)
            assert await writer.read(lambda core: core.leased.leases[token].deadline) == due
            assert world.opened <= 1 + 3, "after 0, 1 and 3 seconds"
            assert writer.alive
            assert "the scheduler fails" in writer.ailing
            opened = world.opened
            await asyncio.sleep(0.3)
            assert world.opened == opened, "nobody asks, and no time passes"
            await world.until(12.0)
            assert await writer.read(lambda core: core.leased.leases) == {}
            monkeypatch.undo()
            await world.until(80.0)
            assert writer.ailing == ""

    asyncio.run(main())


def test_a_permit_whose_loss_the_scheduler_fails_on_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with failing(tmp_path, monkeypatch) as world:
            tokens = [
                await world.writer.read(partial(permitted, job=job)) for job in ("a", "b", "c")
            ]
            handle = scheduler._HANDLERS[ev.PermitLost]

            def lost(self: object, now: float, event: ev.PermitLost) -> None:
                if event.job == "b":
                    raise KeyError("of the scheduler")
                handle(self, now, event)

            monkeypatch.setitem(scheduler._HANDLERS, ev.PermitLost, lost)
            await world.until(12.0)
            left = await world.writer.read(lambda core: list(core.leased.leases))
            assert left == [tokens[1]]
            assert "1 event" in world.writer.ailing

    asyncio.run(main())


def test_the_end_of_one_job_that_fails_is_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave a fenced permit back next got 500 for it, and the log was read again."""

    async def main() -> None:
        async with failing(tmp_path, monkeypatch) as world:
            tokens = [await world.writer.read(partial(permitted, job=job)) for job in ("a", "b")]
            handle = scheduler._HANDLERS[ev.JobEnded]

            def ended(self: object, now: float, event: ev.JobEnded) -> None:
                if event.job == "a":
                    raise KeyError("of the scheduler")
                handle(self, now, event)

            monkeypatch.setitem(scheduler._HANDLERS, ev.JobEnded, ended)
            for job in ("a", "b"):
                asked = bodies.Post(f"{job}/end", "")
                await world.writer.call(partial(commands.end, request=asked, job=job))
            with pytest.raises(Refused) as refused:
                await given_back(world, tokens[0])
            assert refused.value.status == 500
            await world.looks()
            opened = world.opened
            with pytest.raises(Refused) as refused:
                await given_back(world, tokens[1])
            assert (refused.value.status, refused.value.body["code"]) == (409, "lost")
            assert world.opened == opened
            assert await world.writer.read(lambda core: core.leased.state("b")) == "ended"

    async def given_back(world: Failing, token: int) -> None:
        asked = bodies.Post(f"back/{token}", "")
        await world.writer.call(
            partial(commands.abandon, request=asked, token=token, _=bodies.OfJob())
        )

    asyncio.run(main())


def test_a_node_whose_failure_the_scheduler_fails_on_is_silent_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent was forgotten before, and came back with the log as one that has just reported."""

    def reported(core: TransactionLog) -> str:
        alone, asked = bodies.NewJob(id="a", **SPEC), bodies.Post("a", "")
        commands.once(core, asked, lambda: commands.submit(core, asked, alone))
        node = next(iter(core.leased.scheduler.cluster.nodes))
        commands.node_heartbeat(core, bodies.Post("b", ""), node, bodies.AliveBody())
        return node

    async def main() -> None:
        async with failing(tmp_path, monkeypatch) as world:
            node = await world.writer.read(reported)
            seen = await world.writer.read(lambda core: core.leased.agents[node])
            world.on(ev.NodeFailed)
            await world.until(30.0)
            assert await world.writer.read(lambda core: core.leased.agents) == {node: seen}
            assert world.opened <= 1 + 5, "after 10, 11, 13, 17 and 25 seconds"

    asyncio.run(main())


def test_a_look_that_fails_reads_no_log_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has happened, so there is nothing to forget."""

    def look(core: TransactionLog) -> None:
        raise KeyError("of a view")

    async def main() -> None:
        async with failing(tmp_path, monkeypatch) as world:
            with pytest.raises(Refused) as refused:
                await world.writer.read(look)
            assert (refused.value.status, refused.value.body["code"]) == (500, "poisoned")
            assert (world.opened, world.writer.stats.poisoned) == (1, 1)
            await world.looks()

    asyncio.run(main())
