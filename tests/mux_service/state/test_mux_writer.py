"""The order in which a batch is done, and when it is committed."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from mux_world import SHARED, World

from rollpacker.rollmux.scheduler import queue
from rollpacker.rollmux.service.commands import commands, writer
from rollpacker.rollmux.service.commands.writer import Answer, Command, Writer
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store


def test_heartbeats_go_first_and_a_long_batch_is_committed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred submissions at once kept every heartbeat waiting for all of them."""
    monkeypatch.setattr(writer, "COMMIT_S", 0.0)
    done: list[str] = []
    commits: list[int] = []

    def command(name: str) -> Command:
        def act(core: TransactionLog) -> Answer:
            core.record(daemon_events.DrainSet(draining=False))
            done.append(name)
            return Answer(200, {})

        return act

    async def main() -> None:
        made = Writer(lambda: TransactionLog(Store(tmp_path / "x"), None, 10.0), commands.poll)
        made.stats.observe = lambda count, _: commits.append(count)
        loop = asyncio.get_running_loop()
        made._loop = loop
        names = ["a", "b", "beat", "c"]
        calls = [
            asyncio.ensure_future(made.call(command(each), beat=each == "beat")) for each in names
        ]
        await asyncio.sleep(0)
        made.start(loop)
        await asyncio.to_thread(made.stop)
        assert [each.status for each in await asyncio.gather(*calls)] == [200] * 4  # type: ignore[union-attr]

    asyncio.run(main())
    assert done == ["beat", "a", "b", "c"]
    assert commits == [1, 1, 1, 1]


def test_so_many_jobs_of_a_team_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MOST_OF_A_TEAM", 2)
    assert queue.MOST_OF_A_TEAM == 500
    world = World(tmp_path, replace(SHARED, limit=(1, 1)))
    for name, told in (("runs", 201), ("a", 201), ("b", 201), ("c", 409)):
        assert world.submit(name, slo=1.0, team="t")[0] == told
    assert world.submit("d", slo=1.0)[0] == 201, "of another team"
    world.store.close()
