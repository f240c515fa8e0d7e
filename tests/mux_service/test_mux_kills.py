"""The daemon is killed at random moments under many clients; nothing that it said is taken back."""

import json
import random
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mux_fleet import Client, Daemon, Link
from mux_verdict import Log, verdict


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


def test_five_kills(tmp_path: Path) -> None:
    judge(storm(tmp_path, clients=6, kills=5, answers=60))


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
