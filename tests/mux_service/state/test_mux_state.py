"""A daemon that starts from what is on disk is the one that never stopped, whatever happened
before; also where another version wrote it."""

import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from mux_twin import lasting, seen, twin
from mux_world import TTL, World
from test_mux_machine import PICK, ServiceMachine

import rollpacker
from rollpacker.core.codec import loads
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.seat import SeatState
from rollpacker.rollmux.model.settings import Settings, Team
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import JobRecord
from rollpacker.rollmux.service.state.state_record import (
    History,
    Pieces,
    decode,
    encode,
    restored,
    state_of,
)
from rollpacker.rollmux.service.store import Store, StoreError

TEAMS = (Team(name="a", rollout=2, train=2),)
NAMED = Settings(warm_s=0.0, cold_s=1.0, nodes="named", teams=TEAMS, patience_s=60.0)
MACHINES = [
    Machine(name=f"{pool}-{n}", pool=pool) for pool in ("rollout", "train") for n in range(4)
]


def test_the_numbers_of_states_in_databases_stay() -> None:
    """6 and 7 were those of members that round-robin had set aside."""
    numbers = {"WAIT_R": 0, "RUN_R": 1, "IDLE_T": 2, "WAIT_T": 3, "RUN_T": 4, "IDLE_R": 5}
    assert {each.name: each.value for each in SeatState} == numbers | {"AWAY": 8}


@given(st.lists(st.dictionaries(st.integers(0, 99), st.integers(0, 2)), min_size=2))
def test_differences_of_long_lists_sum_up_to_the_state(lists: list[dict[int, int]]) -> None:
    """The lists have several blocks of rows, which come, change, move and go."""
    leased, pieces = LeasedScheduler(NAMED, TTL), Pieces({"of another version": b"1"})
    for rows in [dict.fromkeys(range(100), 0), *lists, dict.fromkeys(range(70), 1)]:
        specs = {n: JobSpec(id=f"j{n}", worst_rollout_s=1, worst_train_s=1) for n in rows}
        jobs = [JobRecord(n, specs[n], 0.0, done=done) for n, done in rows.items()]
        state = replace(state_of(leased), jobs=jobs)
        again, difference = (pieces.difference(state) for _ in range(2))
        assert again == difference  # the first was not written
        pieces.accept(difference)
        assert pieces.written == encode(state)
        assert pieces.difference(state)[:2] == ({}, set())


class StateMachine(ServiceMachine):
    """Beside the daemon, schedulers that were restored at some point hear what happens after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows: list[LeasedScheduler] = []

    @rule(down_s=st.sampled_from([0.0, 1.0, 3 * TTL]))
    def restart(self, down_s: float) -> None:
        """It numbers its permits in an epoch of its own."""
        super().restart(down_s)
        self.world.core.record(daemon_events.DrainSet(draining=False))
        self.shadows.clear()

    @rule()
    def restore(self) -> None:
        core = self.world.core
        core.commit()
        ended = [core.leased.jobs[name] for name in core.leased.ended]
        state = decode(self.world.store.state())
        history = History(ended, core.leased.timeline)
        self.shadows = [*self.shadows[-2:], restored(state, history, core.settings, TTL)]

    @rule()
    def start_another(self) -> None:
        self.world.core.commit()
        with twin(self.world) as other:
            assert other.leased.seq == self.world.core.leased.seq
            assert lasting(seen(other)) == lasting(seen(self.world.core))

    @rule()
    def undo(self) -> None:
        """As where the scheduler fails on the next request."""
        before = seen(self.world.core)
        self.world.core.undo()
        assert lasting(seen(self.world.core)) == lasting(before)

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
            self.world.post(commands.node_heartbeat, node, {"attempts": there})

    @invariant()
    def shadows_are_the_daemon(self) -> None:
        self.world.core.commit()
        for leased in self.shadows:
            for entry in self.world.store.entries(leased.seq):
                effects = leased.apply(
                    entry.seq, entry.t, daemon_events.decode(entry.event), entry.key
                )
                assert loads(daemon_events.encode(effects.decisions)) == loads(entry.decisions)
            assert encode(state_of(leased)) == encode(state_of(self.world.core.leased))

    @invariant()
    def what_is_written_is_the_state(self) -> None:
        self.world.core.commit()
        written = {name: text.encode() for name, text in self.world.store.state().items()}
        assert written == encode(state_of(self.world.core.leased))


class NamedMachine(StateMachine):
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
            self.world.post(commands.node_opened, machine.name)
        elif how == "register":
            body = {"name": machine.name, "pool": machine.pool}
            self.world.post(commands.register, None, body)
        else:
            self.world.post(commands.node_closed, machine.name, {"status": how})


HOW = settings(
    max_examples=settings().max_examples // 8,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestRented = StateMachine.TestCase
TestRented.settings = HOW
TestNamed = NamedMachine.TestCase
TestNamed.settings = HOW


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A job that has ended, one with a permit, one that has not asked."""
    world = World(tmp_path)
    world.submit("over", iterations=1)
    for phase in ("rollout", "train"):
        world.run("over", phase, 3.0)
    assert world.post(commands.end, "over")[0] == 200
    world.submit("live")
    assert world.ask("live", "rollout")[1]["token"] == 2
    world.submit("new")
    return world


def test_a_commit_writes_what_differs(world: World) -> None:
    """However many jobs there are: the entry, its number, and what it changed."""
    for number in range(40):
        world.submit(f"j{number}")
    for draining in (True, False):
        before = world.store._db.total_changes
        world.post(commands.drain, None, {"draining": draining})
        assert world.store._db.total_changes - before == 3
    world.store.close()


def test_a_state_that_cannot_be_read_is_named(world: World) -> None:
    world.store._db.execute("UPDATE state SET value = '\"x\"' WHERE name = 'issued'")
    with pytest.raises(StoreError, match=r"cannot be read by version .*issued"):
        world.restart()


def test_a_database_of_format_1_becomes_one_of_today(tmp_path: Path) -> None:
    """A snapshot with a job that had ended by then, and entries after it; a permit is out."""
    with sqlite3.connect(tmp_path / "mux.sqlite") as db:
        db.executescript(Path(__file__).with_name("format_1.sql").read_text(encoding="utf-8"))
    db.close()
    world = World(tmp_path)
    for _ in range(2):
        leased = world.core.leased
        assert {name: leased.state(name) for name in leased.jobs} == {
            "ended": "ended",
            "live": "running",
            "new": "idle",
        }
        assert [stretch.token for stretch in leased.timeline] == [0, 1, 2, 3]
        assert leased.jobs["live"].done == 1
        assert world.store.meta()["format"] == "2"
        world.restart()
    assert world.finish(4, key="new-1")[0] == 200
    again = {"id": "ended", "worst_rollout_s": 10.0, "worst_train_s": 10.0}
    assert world.post(commands.submit, None, again, "new-2")[1]["code"] == "exists"
    world.store.close()


OTHER = {
    "a field more": (
        "rollmux/model/decisions.py",
        "    token: int\n",
        '    token: int\n    colour: str = "red"\n',
    ),
    "a field of a job less": (
        "rollmux/service/state/records.py",
        "    uncounted_s: float = 0.0\n    program",
        "    later_s: float = 0.5\n    program",
    ),
    "other decisions": (
        "rollmux/scheduler/scheduler.py",
        "        return list(self._made)",
        "        return []",
    ),
}
"""Of a later version: a file, and what is otherwise in it."""
OPEN = """
import sys
from dataclasses import replace
from pathlib import Path
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store
log = TransactionLog(Store(Path(sys.argv[1])), None, 30.0)
print({name: log.leased.state(name) for name in log.leased.jobs}, len(log.leased.leases))
"""


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("how", OTHER)
def test_another_version_opens_it(world: World, tmp_path: Path, how: str, drained: bool) -> None:
    """It compares nothing: what was decided is decided."""
    if drained:
        for job in ("live", "new"):
            world.post(commands.end, job)
        assert world.post(commands.abandon, 2)[0] == 409
        world.store.set_closed(True)
    world.store.close()
    package = tmp_path / "later/rollpacker"
    source = Path(rollpacker.__file__).parent
    shutil.copytree(source / "rollmux", package / "rollmux")
    for part in source.iterdir():
        if part.name != "rollmux":
            (package / part.name).symlink_to(part)
    file, old, new = OTHER[how]
    text = (package / file).read_text(encoding="utf-8")
    assert old in text
    (package / file).write_text(text.replace(old, new), encoding="utf-8")
    states = ("ended", "ended", 0) if drained else ("running", "idle", 1)
    ran = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "mux.sqlite")],
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = {"over": "ended", "live": states[0], "new": states[1]}
    assert ran.stdout == f"{expected} {states[2]}\n", ran.stderr


def test_a_new_store_has_a_state_before_anything_happens(tmp_path: Path) -> None:
    store = Store(tmp_path / "mux.sqlite")
    store.close()
    world = World(tmp_path)
    assert decode(world.store.state()).seq == 0
    world.core.undo()
    assert world.submit("a")[0] == 201
    world.store.close()
