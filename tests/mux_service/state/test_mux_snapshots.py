"""A daemon that starts from a snapshot is the one that never stopped, whatever happened before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from mux_twin import lasting, seen, twin
from mux_world import TTL, World
from test_mux_machine import PICK, ServiceMachine

from rollpacker.core.codec import loads
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings, Team
from rollpacker.rollmux.service.commands import commands, node_commands
from rollpacker.rollmux.service.state import daemon_events, recovery, state_record
from rollpacker.rollmux.service.state import snapshots as snaps
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import StoredSnapshot, StoreError

TEAMS = (Team(name="a", rollout=2, train=2),)
NAMED = Settings(warm_s=0.0, cold_s=1.0, nodes="named", teams=TEAMS, patience_s=60.0)
MACHINES = [
    Machine(name=f"{pool}-{n}", pool=pool) for pool in ("rollout", "train") for n in range(4)
]


def snapshot(core: TransactionLog) -> None:
    core.commit()
    core.keeper.keep(core.leased, core._digest)


class SnapshotMachine(ServiceMachine):
    """Beside the daemon, schedulers that were restored at some point hear what happens after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows: list[LeasedScheduler] = []

    @rule()
    def restore(self) -> None:
        core = self.world.core
        snapshot(core)
        found = recovery.recover(core.store, core.settings, TTL, {})
        assert found.replayed == 0
        self.shadows = [*self.shadows[-2:], found.leased]

    @rule()
    def start_others(self) -> None:
        self.world.core.commit()
        with twin(self.world, snapshots=True) as short, twin(self.world, snapshots=False) as long:
            assert short.leased.seq == long.leased.seq == self.world.core.leased.seq
            assert seen(short) == seen(long)
            assert lasting(seen(short)) == lasting(seen(self.world.core))

    @rule(pick=PICK, code=st.sampled_from([None, None, 0, 3]))
    def beat_of_agent(self, pick: int, code: int | None) -> None:
        """Of one that starts programs, all of which end with ``code``."""
        leased = self.world.core.leased
        nodes = sorted(leased.scheduler.cluster.nodes | dict(leased.slots))
        if nodes:
            node = nodes[pick % len(nodes)]
            there = [
                {"job": job, "number": running.number, "code": code}
                for job in leased.programs.on(node)
                if (program := leased.jobs[job].program) and (running := program.running)
            ]
            self.world.post(node_commands.node_heartbeat, node, {"attempts": there})

    @invariant()
    def shadows_are_the_daemon(self) -> None:
        self.world.core.commit()
        for leased in self.shadows:
            for entry in self.world.store.entries(leased.seq):
                effects = leased.apply(
                    entry.seq, entry.t, daemon_events.decode(entry.event), entry.key
                )
                assert loads(daemon_events.encode(effects.decisions)) == loads(entry.decisions)
            assert text_of(leased) == text_of(self.world.core.leased)

    def teardown(self) -> None:
        core = self.world.core
        found = recovery.verify(core.store, core.settings, TTL, {})
        assert text_of(found.leased) == text_of(core.leased)
        super().teardown()


def text_of(leased: LeasedScheduler) -> Any:
    return loads(state_record.encode(state_record.state_of(leased)))


class NamedMachine(SnapshotMachine):
    """The same on named nodes that come and go, with teams and a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.world.store.close()
        self.folder = self.folder / "named"
        self.folder.mkdir()
        self.world = World(self.folder, NAMED, MACHINES)

    @precondition(lambda self: len(self.jobs) < 12)
    @rule(team=st.sampled_from(["", "a"]), priority=st.integers(0, 2))
    def submit_for_a_team(self, team: str, priority: int) -> None:
        name = f"j{len(self.jobs)}"
        program = {"command": ["a"], "restarts": 1, "environment": {"B": "c"}}
        more = {"program": program} if priority else {}
        told = self.world.submit(name, team=team, priority=priority, iterations=2, **more)
        assert told[0] == 201
        self.jobs.append(name)

    @rule(pick=PICK, how=st.sampled_from(["cordoned", "draining", "open", "register"]))
    def node_changes(self, pick: int, how: str) -> None:
        machine = MACHINES[pick % len(MACHINES)]
        if how == "open":
            self.world.post(node_commands.node_opened, machine.name)
        elif how == "register":
            body = {"name": machine.name, "pool": machine.pool}
            self.world.post(node_commands.register, None, body)
        else:
            self.world.post(node_commands.node_closed, machine.name, {"status": how})


HOW = settings(
    max_examples=settings().max_examples // 8,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestRented = SnapshotMachine.TestCase
TestRented.settings = HOW
TestNamed = NamedMachine.TestCase
TestNamed.settings = HOW


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two snapshots, with entries before, between and after them."""
    world = World(tmp_path)
    for number in range(3):
        world.submit(f"j{number}", iterations=1)
        world.run(f"j{number}", "rollout", 3.0)
        if number < 2:
            world.run(f"j{number}", "train", 3.0)
            assert world.post(commands.end, f"j{number}")[0] == 200
            snapshot(world.core)
    return world


def begun_with(world: World) -> int:
    """Restart; the entry of the snapshot that was used."""
    world.restart()
    base = recovery.recover(world.store, world.core.settings, TTL, {}).base
    return 0 if base is None else base.seq


def test_the_newest_two_are_kept_and_the_newest_is_used(world: World) -> None:
    first, second = sorted(each.seq for each in world.store.snapshots())
    assert begun_with(world) == second
    world.submit("more")
    snapshot(world.core)
    assert [each.seq for each in world.store.snapshots()] == [world.core.leased.seq, second]
    assert first not in {each.seq for each in world.store.snapshots()}
    assert list(world.core.leased.jobs) == ["j0", "j1", "j2", "more"]
    world.store.close()


SPOILED: dict[str, Callable[[StoredSnapshot], StoredSnapshot]] = {
    "cut": lambda was: was._replace(state=was.state[:-9]),
    "altered": lambda was: was._replace(state=was.state.replace('"issued":', '"issued":1')),
    "of another version": lambda was: was._replace(version="0.0/0"),
    "of other entries": lambda was: snaps.sealed(was.seq, "f" * 32, was.ended, was.state),
    "of no entry": lambda was: snaps.sealed(10_000, was.digest, was.ended, was.state),
    "no state": lambda was: snaps.sealed(was.seq, was.digest, was.ended, '{"seq":1}'),
    "of other ended jobs": lambda was: snaps.sealed(was.seq, was.digest, "", was.state),
    "wrong": lambda was: snaps.sealed(
        was.seq, was.digest, was.ended, was.state.replace('"number":', '"number":1')
    ),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("spoiled", [1, 2])
def test_a_snapshot_that_is_no_good_is_passed_over(world: World, how: str, spoiled: int) -> None:
    """For the one before it, then for the whole log; the next one is good again."""
    newest, older = world.store.snapshots()
    for was in (newest, older)[:spoiled]:
        world.store._db.execute("DELETE FROM snapshots WHERE seq = ?", (was.seq,))
        put = SPOILED[how](was)
        if put.seq != was.seq and was is older:
            continue
        world.store._db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", put)
    before = text_of(world.core.leased)
    assert begun_with(world) == (older.seq if spoiled == 1 else 0)
    assert text_of(world.core.leased) == before
    world.submit("more")
    snapshot(world.core)
    assert begun_with(world) == world.core.leased.seq
    recovery.verify(world.store, world.core.settings, TTL, {})
    world.store.close()


def test_verifying_finds_a_snapshot_that_entries_do_not_lead_to(world: World) -> None:
    """Also one that no later decision would betray."""
    recovery.verify(world.store, world.core.settings, TTL, {})
    newest = world.store.snapshots()[0]
    state = newest.state.replace('"draining":false', '"draining":true')
    put = snaps.sealed(newest.seq, newest.digest, newest.ended, state)
    world.store._db.execute("DELETE FROM snapshots WHERE seq = ?", (put.seq,))
    world.store._db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", put)
    with pytest.raises(StoreError, match=f"snapshot of entry {put.seq} is not what"):
        recovery.verify(world.store, world.core.settings, TTL, {})
    world.store.close()


def test_verifying_finds_an_entry_that_was_altered_before_a_snapshot(world: World) -> None:
    world.store._db.execute("UPDATE entries SET t = t + 1 WHERE seq = 2")
    assert begun_with(world) > 2
    with pytest.raises(StoreError, match="entry 2 was altered"):
        recovery.verify(world.store, world.core.settings, TTL, {})
    world.store.close()


def test_a_database_of_before_snapshots_opens_and_gets_some(world: World) -> None:
    before = text_of(world.core.leased)
    for table in ("snapshots", "ended_jobs"):
        world.store._db.execute(f"DROP TABLE {table}")
    world.restart()
    assert text_of(world.core.leased) == before
    snapshot(world.core)
    assert begun_with(world) == world.core.leased.seq
    world.store.close()


def test_a_full_disk_costs_a_snapshot_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = world.store.snapshots()
    monkeypatch.setattr(snaps, "EVERY", 1)
    pages = world.store._db.execute("PRAGMA page_count").fetchone()[0]
    world.store._db.execute(f"PRAGMA max_page_count = {pages}")
    world.core.keep()
    assert world.store.snapshots() == kept
    world.store._db.execute("PRAGMA max_page_count = 1000000")
    world.core.keep()
    assert world.store.snapshots() == kept, "tried again only after more entries"
    world.submit("more")
    world.core.keep()
    assert world.store.snapshots()[0].seq == world.core.leased.seq
    world.store.close()


def test_one_is_due_after_entries_after_work_and_at_a_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, seq = world.core.keeper, world.store.snapshots()[0].seq
    assert not keeper.due(seq + 10)
    assert keeper.due(seq + snaps.EVERY)
    keeper.worked_s = snaps.EVERY_S + 0.1
    assert keeper.due(seq + 10)
    monkeypatch.setattr(snaps, "AT_STOP", 1)
    world.core.leave()
    assert world.store.snapshots()[0].seq == world.core.leased.seq
    world.store.close()
