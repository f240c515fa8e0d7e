"""Reports of runs whose replicas have devices of their own."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from report_runs import page_data

from rollpacker.report.drawing import gantt_data
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading.run_folder import ReportError, load_run
from rollpacker.report.run_report import write_report
from rollpacker.report.timeline import write_timeline


@pytest.fixture
def apart(copy):
    """A run whose gradients were summed by one replica of two devices, engines of one each."""

    def made(devices: int = 2, engine_devices: int = 1) -> Path:
        folder = copy("off")
        role = {"role": "replica", "devices": devices, "engine_devices": engine_devices}
        tasks = [json.loads(line) for line in (folder / "workers.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(t | role) + "\n" for t in tasks if t["worker"] == 0)
        (folder / "workers.jsonl").write_text(text)
        return folder

    return made


def test_engines_and_replicas_are_rows_of_their_own(apart, made):
    run, together = load_run(apart()), load_run(made["off"])
    assert [run.place(n).name for n in (0, 1, 2)] == ["engine 0", "engine 1", "replica 0"]
    assert [together.place(n).name for n in (0, 1)] == ["worker 0", "worker 1"]
    assert set(run.tasks["worker"]) == {2}
    chart = Gantt(run).chart(3)
    rows = [(row["kind"], row["worker"]) for row in chart["workers"]]
    assert rows == [("engine", 0), ("engine", 1), ("replica", 0)]
    engine, _, replica = chart["workers"]
    assert engine["attempts"]
    assert not engine["tasks"]
    assert replica["tasks"]
    assert not replica["attempts"]
    before = Gantt(together).chart(3)["workers"]
    assert [(row["kind"], row["worker"]) for row in before] == [("worker", 0), ("worker", 1)]
    assert engine["attempts"] == before[0]["attempts"]
    assert replica["tasks"] == before[0]["tasks"]


@pytest.mark.parametrize(("replica", "engine"), [(1, 1), (2, 1), (2, 8)])
def test_a_bubble_counts_devices(apart, replica, engine):
    drawn = Gantt(load_run(apart(replica, engine)))
    shares = [row["bubble"] for row in drawn.chart(3)["workers"]]
    idle = engine * (shares[0] + shares[1]) + replica * shares[2]
    assert drawn.shares[3][0] == pytest.approx(idle / (2 * engine + replica), abs=1e-3)


def test_the_page_and_the_timeline_name_both(apart):
    folder = apart()
    html = write_report(folder)
    assert "idle time of 2 engines and 1 replica" in html.read_text(encoding="utf-8")
    (found,) = page_data(html)["gantts"].values()
    assert len(found["charts"][0]["workers"]) == 3
    events = json.loads(write_timeline(folder).read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    kinds = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            kinds[names[event["pid"]]].add(event["cat"])
    assert kinds["replica 0"] == {"gradient"}
    assert kinds["engine 0"] == {"kept"}


def test_many_engines_leave_room_for_replicas(apart, monkeypatch):
    drawn = Gantt(load_run(apart()))
    monkeypatch.setattr(gantt_data, "MAX_WORKERS", 4)
    drawn.workers = [0, 1, *[0] * 10, 2]
    assert [row["kind"] for row in drawn.chart(3)["workers"]] == ["engine"] * 3 + ["replica"]


def test_a_replica_without_its_devices_is_an_error(apart):
    folder = apart()
    with (folder / "workers.jsonl").open("a") as file:
        line = {"step": 0, "worker": 0, "prompts": 0, "start_s": 0.0, "end_s": 1.0, "kind": "apply"}
        file.write(json.dumps(line | {"role": "replica"}) + "\n")
    with pytest.raises(ReportError, match=r"workers.jsonl, line \d+: no 'devices'"):
        load_run(folder)
