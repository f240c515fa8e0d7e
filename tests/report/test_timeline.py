from __future__ import annotations

import json
from collections import defaultdict

import polars as pl
import pytest
from report_runs import MODES

from rollpacker.report.reading.run_folder import load_run
from rollpacker.report.timeline import write_timeline

REQUIRED = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
}


@pytest.fixture(scope="module")
def traces(made):
    return {
        mode: json.loads(write_timeline(made[mode]).read_text(encoding="utf-8")) for mode in MODES
    }


def of(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("mode", MODES)
def test_events_are_well_formed(traces, mode):
    events = traces[mode]["traceEvents"]
    for event in events:
        assert set(event) == REQUIRED[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in of(traces[mode], "M") if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in of(traces[mode], "X")} <= named


@pytest.mark.parametrize("mode", MODES)
def test_events_of_a_thread_nest_or_follow_each_other(traces, mode):
    threads = defaultdict(list)
    for event in of(traces[mode], "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_holds_the_run(made, traces, mode):
    run = load_run(made[mode])
    complete = of(traces[mode], "X")
    decoded = [e for e in complete if e["cat"] in ("kept", "aborted")]
    assert {e["args"]["attempt"] for e in decoded} == set(run.samples["attempt"])
    spent = (run.samples["end_s"] - run.samples["start_s"]).sum()
    assert sum(e["dur"] for e in decoded) / 1e6 == pytest.approx(spent, rel=1e-3)
    assert sum(e["cat"] == "gradient" for e in complete) == len(run.tasks)
    graded = run.samples.filter(pl.col("grade_s").is_not_null())
    assert sum(e["cat"] == "grading" for e in complete) == len(graded)
    assert sum(e["cat"] == "step" for e in complete) == len(run.metrics)
    names = {e["args"]["name"] for e in of(traces[mode], "M") if e["name"] == "process_name"}
    assert names == {"steps", "rewards", "worker 0", "worker 1"}


@pytest.mark.parametrize("mode", MODES)
def test_counters_are_the_running_attempts(traces, mode):
    for pid in (10, 11):
        counts = [e for e in of(traces[mode], "C") if e["pid"] == pid]
        values = [e["args"]["running"] for e in counts]
        assert min(values) == values[-1] == 0
        assert max(values) == (100 if mode == "race" else 64)
        assert [e["ts"] for e in counts] == sorted({e["ts"] for e in counts})


def test_a_long_run_shows_its_last_steps(made):
    path = write_timeline(made["exact"], max_attempts=300)
    trace = json.loads(path.read_text(encoding="utf-8"))
    steps = [e["name"] for e in of(trace, "X") if e["cat"] == "step"]
    assert steps == ["step 10 (full)", "step 11 (full)"]
