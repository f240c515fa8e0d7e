from __future__ import annotations

import json
import tracemalloc
from collections import defaultdict
from pathlib import Path

import polars as pl
import pytest
from report_runs import page_data

from rollpacker.core import sample_table
from rollpacker.report.drawing import gantt_data
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading.run_folder import ReportError, load_run
from rollpacker.report.run_report import write_report
from rollpacker.report.timeline import write_timeline

PART = "samples/step-000000.parquet"
NEEDED = ("config.yaml", "metrics.jsonl", "journal.jsonl", "workers.jsonl", PART)


def complaint(folder) -> str:
    with pytest.raises(ReportError) as caught:
        load_run(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)
    return message


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_file_is_named(copy, name):
    folder = copy("exact")
    (folder / name).unlink()
    assert (name if name != PART else "samples") in complaint(folder)


def test_no_folder(tmp_path):
    assert "no such run folder" in complaint(tmp_path / "nowhere")


def test_a_torn_parquet_file_is_named(copy):
    folder = copy("exact")
    file = folder / PART
    file.write_bytes(file.read_bytes()[:2000])
    said: list[str] = []
    run = load_run(folder, said.append)
    [line] = said
    assert f"{PART}: not a whole parquet file" in line
    assert run.samples.is_empty()
    assert len(run.missing) == len(run.metrics) > 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "workers.jsonl", "journal.jsonl"])
def test_a_damaged_line_is_named(copy, name):
    folder = copy("exact")
    lines = (folder / name).read_text().splitlines(keepends=True)
    lines[4] = lines[4][:20] + "\n"
    (folder / name).write_text("".join(lines))
    assert f"{name}, line 5: not JSON" in complaint(folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "workers.jsonl", "journal.jsonl"])
def test_a_line_that_is_something_else_is_named(copy, name):
    folder = copy("exact")
    with (folder / name).open("a") as file:
        file.write('{"other": 1}\n')
    count = len((folder / name).read_text().splitlines())
    assert f"{name}, line {count}: " in complaint(folder)


def test_the_last_line_may_be_torn(copy):
    folder = copy("exact")
    for name in ("metrics.jsonl", "workers.jsonl", "journal.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 12, "wor')
    assert len(load_run(folder).metrics) == 12


def test_missing_columns_are_named(copy):
    folder = copy("exact")
    file = folder / PART
    pl.read_parquet(file).drop("start_s", "state").write_parquet(file)
    said: list[str] = []
    assert load_run(folder, said.append).samples.is_empty()
    [line] = said
    assert "lacks the columns state, start_s" in line


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "cannot be read as YAML"), ("- 1", "expected keys and values")]
)
def test_a_config_that_is_none(copy, text, said):
    folder = copy("exact")
    (folder / "config.yaml").write_text(text)
    assert said in complaint(folder)


def test_a_summary_that_is_no_json(copy):
    folder = copy("exact")
    (folder / "summary.json").write_text("{")
    assert "summary.json: not JSON" in complaint(folder)


def test_a_run_that_is_going_on_has_parts_and_no_summary(copy, made):
    folder = copy("race")
    (folder / "summary.json").unlink()
    whole = pl.read_parquet(folder / "samples" / "*.parquet")
    for step in whole["step"].unique():
        part = sample_table.part(folder, step)
        whole.filter(pl.col("step") == step).write_parquet(part)
    run = load_run(folder)
    assert run.samples.equals(load_run(made["race"]).samples)
    assert run.summary == {}


def test_the_last_try_of_a_repeated_step_counts(copy):
    folder = copy("exact")
    before = load_run(folder)
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines + lines))
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics + metrics)
    again = load_run(folder)
    assert again.moves.equals(before.moves)
    assert again.rounds.equals(before.rounds)
    assert again.metrics == before.metrics


def test_a_journal_is_read_line_by_line(copy):
    """Its lines are never in memory together: that of a long run is as large as the disk allows."""
    folder = copy("off")
    journal = folder / "journal.jsonl"

    def most() -> int:
        tracemalloc.start()
        try:
            load_run(folder)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    load_run(folder)
    before = most()
    line = '{"t": 1.0, "event": {"kind": "Waited"}, "decisions": []}\n'
    with journal.open("a", encoding="utf-8") as file:
        file.write(line * 10_000)
    assert most() - before < 10_000 * len(line)


def test_migrations_come_from_the_journal(made):
    assert len(load_run(made["off"]).moves) == 0
    moves = load_run(made["exact"]).moves
    assert len(moves) > 50
    assert set(moves.group_by("attempt").len()["len"]) == {2}


# --- test layouts: Reports of runs whose replicas have devices of their own.


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
