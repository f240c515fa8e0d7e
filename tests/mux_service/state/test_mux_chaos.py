"""A daemon, agents and jobs under faults of every kind: promises kept, nothing lost or doubled."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from event_check import check_lines
from mux_chaos import FAULTS, Chaos

from rollpacker.rollmux.service.state.attempts import MOST_NODES_LOST
from rollpacker.rollmux.service.views.history import event_log, journal


def finished(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The phases of each job that were counted, in order; a failure makes a rollout void."""
    phases: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        event = entry["event"]
        if event["kind"] == "PhaseFinished":
            phases[event["job"]].append(event["phase"])
        for made in entry["decisions"]:
            void = made["kind"] == "Wait" or (
                made["kind"] == "Move" and made["reason"] == "failure"
            )
            mine = phases[made["job"]] if void else []
            if mine and mine[-1] == "rollout":
                mine.pop()
    return phases


def judge(chaos: Chaos) -> dict[str, int]:
    lines = "".join(journal(chaos.world.store.reader())).splitlines()
    phases = finished([json.loads(line) for line in lines])
    for name in chaos.jobs:
        record = chaos.leased.jobs[name]
        mine = phases[name]
        assert mine == ["rollout", "train"] * (len(mine) // 2) + ["rollout"] * (len(mine) % 2)
        assert record.done == mine.count("train") <= record.spec.iterations
        outcome = record.program.outcome
        if outcome == "done":
            assert record.done == record.spec.iterations, name
        elif outcome == "failed":
            program = record.program
            broke_nodes = program.nodes_lost >= MOST_NODES_LOST
            assert broke_nodes or program.used > program.program.restarts
        else:
            assert (outcome, name in chaos.cancelled) == ("stopped", True), name
    for (job, _), history in chaos.histories.items():
        trains = [done for phase, done in history if phase == "train"]
        assert trains == sorted(set(trains)), (job, history)
    text = "".join(event_log(chaos.world.store.reader(), chaos.world.settings)).splitlines()
    broken = check_lines(text)
    assert [each for each in broken if each.rule != "slo"] == []
    chaos.restart(0.0)
    outcomes = Counter(chaos.leased.jobs[name].program.outcome for name in chaos.jobs)
    return {
        "jobs": len(chaos.jobs),
        "phases": sum(map(len, phases.values())),
        "attempts": sum(chaos.numbers.values()),
        "entries": len(lines),
        "slo missed": len(broken),
        **outcomes,
    }


def storm(folder: Path, seed: int, seconds: float, **calm: float) -> dict[str, Any]:
    chaos = Chaos(folder, seed, **calm)
    chaos.run(seconds)
    chaos.settle()
    found: dict[str, Any] = judge(chaos)
    found |= {"faults": dict(chaos.faults), "longest_s": round(chaos.longest_s, 1)}
    (folder / "numbers.json").write_text(json.dumps(found))
    chaos.world.store.close()
    return found


def test_without_faults_every_promise_is_kept(tmp_path: Path) -> None:
    found = storm(tmp_path, 3, 200.0, share=0.0, every_s=float("inf"))
    assert found["slo missed"] == 0
    assert found["done"] == found["jobs"] > 5


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_some_minutes_of_faults(tmp_path: Path, seed: int) -> None:
    found = storm(tmp_path, seed, 300.0)
    assert found["phases"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_hour_of_faults(tmp_path: Path) -> None:
    found = storm(tmp_path, 7, 3600.0)
    assert found["faults"].keys() >= FAULTS.keys()
