"""Daemon, agents, keepers and programs are killed, stopped and cut off: nothing is lost or doubled.

What is judged is what programs have written while they held a permit, by the machine's clock.
"""

import json
import time
import urllib.request
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from event_check import check_file
from mux_real_chaos import FAULTS, Storm
from mux_real_daemon import Daemon
from test_mux_programs import until

JOBS = 6
EVERY_S = 2.0
MINUTES = 10


def fetch(daemon: Daemon, path: Path, what: str = "events") -> Path:
    token = daemon.token_file.read_text().strip()
    asked = urllib.request.Request(
        f"{daemon.url}/v1/{what}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        path.write_bytes(answer.read())
    return path


def uses(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What was written under each permit."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["what"] in ("begin", "step", "end"):
            found[line["token"]].append(line)
    return found


def overlaps(lines: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Permits under which something was written on a node between another one's first and last."""
    spans: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for token, written in uses(lines).items():
        for node in written[0]["nodes"]:
            spans[node].append((written[0]["t"], written[-1]["t"], token))
    return [
        (node, before[2], after[2])
        for node, all_of_it in spans.items()
        for before, after in pairwise(sorted(all_of_it))
        if after[0] < before[1]
    ]


def judge(storm: Storm) -> dict[str, Any]:
    client = storm.cluster.daemon.client()
    lines = storm.lines()
    assert overlaps(lines) == []
    journal = fetch(storm.cluster.daemon, storm.file.with_name("journal"), "journal").read_text()
    events = [json.loads(line)["event"] for line in journal.splitlines()]
    finished = [e for e in events if e["kind"] == "PhaseFinished"]
    ended = {token for token, w in uses(lines).items() if w[-1]["what"] == "end"}
    counted = [line["token"] for line in lines if line["what"] == "counted"]
    assert {e["token"] for e in finished} <= ended
    assert len(counted) == len(set(counted))
    assert set(counted) <= {e["token"] for e in finished}
    failures = [e["node"] for e in events if e["kind"] == "NodeFailed"]
    attempts = 0
    for name, iterations in storm.jobs.items():
        job = client.job(name)
        trains = sum(e["phase"] == "train" for e in finished if e["job"] == name)
        assert job["done"] == trains
        if name not in storm.ended:
            assert (job["program"]["outcome"], trains) == ("done", iterations), job
        for each in job["program"]["attempts"]:
            assert each["ended"] is not None
            assert each["code"] is not None or each["node"] in failures
        attempts += job["program"]["attempts"][-1]["number"] if job["program"]["attempts"] else 0
    return {"jobs": len(storm.jobs), "phases": len(finished), "attempts": attempts}


def run(folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    storm = Storm(folder, seed)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(JOBS - len(storm.live())):
                storm.submit(storm.rng.randint(4, 8))
            storm.fault()
            pause = time.monotonic() + storm.rng.uniform(0.5, 1.5) * EVERY_S
            while time.monotonic() < pause:
                storm.tend()
                time.sleep(0.1)
        storm.calm()
        until(lambda: over(storm), 300)
        found = judge(storm)
        until(lambda: not storm.left())
        broken = check_file(fetch(storm.cluster.daemon, folder / "events.jsonl"))
        assert {each.rule for each in broken} <= {"slo"}, broken
        found["slo missed"] = len(broken)
        found["faults"] = dict(storm.faults)
        (folder / "numbers.json").write_text(json.dumps(found))
        return found
    finally:
        storm.close()


def over(storm: Storm) -> bool:
    storm.tend()
    storm.open_nodes()
    client = storm.cluster.daemon.client()
    attempts = [a for name in storm.jobs for a in client.job(name)["program"]["attempts"]]
    return not storm.live() and all(each["ended"] is not None for each in attempts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_seconds_of_faults(tmp_path: Path) -> None:
    assert run(tmp_path, 1, 40.0)["phases"] > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_faults(tmp_path: Path) -> None:
    found = run(tmp_path, 2, 60.0 * MINUTES)
    assert found["faults"].keys() >= FAULTS.keys()
