"""The daemon is killed at random moments under many clients; nothing that it said is taken back."""

import json
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mux_fleet import CONTEXT, Client, Daemon, Link
from mux_verdict import Log, verdict
from mux_world import World

from rollpacker.rollmux.model import events as ev


def progress(fleet: list[Client]) -> int:
    assert [client.error for client in fleet if client.error is not None] == []
    return sum(len(client.history.ops) for client in fleet)


def storm(folder: Path, *, clients: int, kills: int, answers: int) -> dict[str, Any]:
    """Kill whenever there were so many more answers, at a random moment after."""
    rng = random.Random(7)
    daemon = Daemon(folder)
    daemon.start()
    stop = threading.Event()
    fleet = [Client(number, daemon.port, daemon.token, stop) for number in range(clients)]
    for client in fleet:
        client.start()
    for _ in range(kills):
        wanted = progress(fleet) + answers
        while progress(fleet) < wanted:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.1))
        daemon.kill()
        daemon.start()
    # A fast daemon is through before anybody has tried a token that is over.
    while not any(client.history.stale for client in fleet):
        progress(fleet)
        time.sleep(0.02)
    stop.set()
    for client in fleet:
        client.join(60)
        assert not client.is_alive(), "a client is stuck"
    errors = [client.error for client in fleet if client.error is not None]
    assert errors == []
    _, text = Link(daemon.port, daemon.token).until_answered("GET", "/v1/journal")
    daemon.stop()
    with sqlite3.connect(folder / "mux.sqlite") as db:
        meta = dict(db.execute("SELECT name, value FROM meta"))
    log = Log(text, float(meta["clock_offset"]))
    found = verdict([client.history for client in fleet], log)
    found["entries"] = len(log.entries)
    found["recovery_s"] = sorted(daemon.recoveries[1:])
    return found


def judge(found: dict[str, Any]) -> None:
    for name in ("jobs_lost", "overlaps", "stale_accepted", "log", "unexplained"):
        assert found[name] == [], name
    assert found["jobs_acknowledged"] > 0
    assert found["permits"] > 0
    assert found["stale_tried"] > 0


def test_three_kills(tmp_path: Path) -> None:
    judge(storm(tmp_path, clients=6, kills=3, answers=40))


def die_in_a_commit(folder: Path, after: str) -> None:
    """In a process of its own, once a statement of the transaction was carried out."""
    world = World(folder)
    before = [""]

    def next_one(sql: str) -> None:
        if before[0].startswith(after):
            os.kill(os.getpid(), signal.SIGKILL)
        before[0] = sql

    world.store._db.set_trace_callback(next_one)
    world.core.record(ev.PermitLost(job="b", token=2))
    world.core.commit()


@pytest.mark.parametrize("after", ["INSERT INTO entries", "INSERT INTO state", "INSERT INTO time"])
def test_a_kill_inside_a_commit_leaves_the_one_before(tmp_path: Path, after: str) -> None:
    world = World(tmp_path)
    for name in ("a", "b"):
        world.submit(name, iterations=1)
        world.run(name, "rollout")
    assert world.ask("b", "train")[1]["token"] == 2
    before = world.store.state()
    world.store.close()
    process = CONTEXT.Process(target=die_in_a_commit, args=(tmp_path, after))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    world.open()
    assert [entry.seq for entry in world.store.entries()] == [1, 2, 3, 4, 5, 6, 7]
    assert world.store.state() == before
    assert len(world.store.timeline(9)) == 2
    world.store.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills_under_32_clients(tmp_path: Path) -> None:
    found = storm(tmp_path, clients=32, kills=200, answers=150)
    judge(found)
    times = found["recovery_s"]
    counts = ("ops", "jobs_acknowledged", "permits", "stale_tried", "entries")
    numbers = {name: found[name] for name in counts}
    numbers["recovery_p50_s"] = times[len(times) // 2]
    numbers["recovery_p99_s"] = times[len(times) * 99 // 100]
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
