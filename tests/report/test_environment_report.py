"""What a report says of a run with an environment: waits, the bubble by tools, curves."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import page_data

from rollpacker.report.drawing import gantt_data
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading import bubbles
from rollpacker.report.reading.run_folder import WAIT_COLUMNS, load_run
from rollpacker.report.run_report import write_report
from rollpacker.report.sections import environment_facts
from rollpacker.report.timeline import write_timeline

TOOLS_0, TOOLS_1 = [(0.0, 1.0), (4.0, 5.0), (5.5, 6.0)], [(0.0, 1.0), (2.0, 5.0)]
EMPTY_1 = [(5.0, 10.5), (11.5, 12.0)]


@st.composite
def stays_and_waits(draw: st.DrawFn) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Stays of attempts, one behind the other, and disjoint waits that may pass their end."""
    stays, waits = [], []
    for attempt in range(draw(st.integers(1, 3))):
        edges = sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=4)))
        spans = enumerate(pairwise(edges))
        stays += [(0, attempt, worker, start, end) for worker, (start, end) in spans]
        cuts = sorted(draw(st.sets(st.integers(0, 12), max_size=6)))
        rows = [(attempt, 0, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        if len(cuts) % 2:
            rows.append((attempt, 0, cuts[-1], None))
        waits += rows
    return (
        pl.DataFrame(stays, bubbles.SEGMENT_COLUMNS, orient="row"),
        pl.DataFrame(waits, WAIT_COLUMNS, orient="row"),
    )


def units(parts: pl.DataFrame) -> list[tuple[int, int, int]]:
    """Attempt, worker and whole second of all that is covered."""
    rows = parts.select("attempt", "worker", "start_s", "end_s").iter_rows()
    return sorted((a, w, unit) for a, w, s, e in rows for unit in range(int(s), int(e)))


@given(stays_and_waits())
def test_a_stay_is_split_into_what_it_decodes_and_what_it_waits(both):
    stays, waits = both
    decoding, waiting = bubbles.split(stays, waits)
    waited = {
        (attempt, unit)
        for attempt, _, start, end in waits.iter_rows()
        for unit in range(int(start), 12 if end is None else int(end))
    }
    every = units(stays)
    assert units(waiting) == [each for each in every if (each[0], each[2]) in waited]
    assert units(decoding) == [each for each in every if (each[0], each[2]) not in waited]
    assert decoding.columns == waiting.columns == stays.columns


def test_without_an_environment_nothing_is_split(made):
    run = load_run(made["exact"])
    assert run.waits.is_empty()
    stays = bubbles.segments(run.samples, run.moves)
    decoding, waiting = bubbles.split(stays, run.waits)
    assert decoding.equals(stays)
    assert waiting.is_empty()
    assert environment_facts(run, Gantt(run)) == {}


def test_waits_are_those_of_the_journal(episodes):
    waits = load_run(episodes).waits.sort("attempt", "start_s")
    assert waits.select("attempt", "start_s", "end_s").rows() == [
        *((0, 0.0, 1.0), (0, 3.0, 6.0), (0, 8.0, None)),
        *((1, 0.0, 1.0), (1, 4.0, 5.0), (1, 5.5, None)),
        *((2, 0.0, 1.0), (2, 2.0, 7.0), (2, 10.0, None)),
        (3, 0.0, None),
        *((4, 0.0, 1.0), (4, 1.5, 5.0), (4, 5.25, None)),
    ]


def test_a_device_whose_responses_all_wait_is_idle_by_tools(episodes):
    chart = Gantt(load_run(episodes))
    rows = {row["worker"]: row for row in chart.bubbles.to_dicts()}
    assert (rows[0]["rollout_idle_s"], rows[0]["rollout_tools_s"]) == (2.5, 2.5)
    assert (rows[1]["rollout_idle_s"], rows[1]["rollout_tools_s"]) == (9.0, 4.0)
    assert (rows[0]["decode_s"], rows[1]["decode_s"]) == (7.5, 1.0)
    assert chart.shares[0] == pytest.approx((11.5 / 20, (3.5 + 10.0) / 24))
    assert chart.tools[0] == pytest.approx(6.5 / 20)


def test_gradients_and_the_tail_are_not_by_tools():
    """A worker that trains while it waits is busy; one that holds nothing is idle by no tool."""
    columns = bubbles.SEGMENT_COLUMNS
    stays = pl.DataFrame([(0, 1, 0, 0.0, 8.0)], columns, orient="row")
    waits = pl.DataFrame([(1, 0, 2.0, 6.0)], WAIT_COLUMNS, orient="row")
    tasks = pl.DataFrame({"step": [0], "worker": [0], "start_s": [3.0], "end_s": [5.0]})
    decoding, waiting = bubbles.split(stays, waits)
    windows = {0: (0.0, 10.0, 10.0)}
    [row] = bubbles.worker_bubbles(decoding, tasks, windows, lambda _: 4, waiting).to_dicts()
    assert (row["rollout_idle_s"], row["rollout_tools_s"]) == (4 * 4.0, 4 * 2.0)


def bars(worker, lane):
    return [row[1:3] for row in worker["attempts"] if row[0] == lane]


def test_the_chart_shows_turns_and_waits_in_one_lane(episodes):
    chart = Gantt(load_run(episodes)).chart(0)
    assert chart["tools_bubble"] == pytest.approx(6.5 / 20, abs=1e-4)
    first, second = chart["workers"]
    assert (first["tools"], first["idle"]) == (TOOLS_0, [(10.0, 10.5), (11.5, 12.0)])
    assert (second["tools"], second["idle"]) == (TOOLS_1, EMPTY_1)
    lane = next(row[0] for row in first["waits"] if row[4] == 0)
    assert bars(first, lane)[:2] == [(1.0, 3.0), (6.0, 8.0)]
    waits = [row[1:3] for row in first["waits"] if row[4] == 0]
    assert waits == [(0.0, 1.0), (3.0, 6.0), (8.0, 9.0)]
    moved = {(row[7], *row[1:3]) for row in first["attempts"] if row[3] == 4}
    assert moved == {(2, 7.0, 10.0), (4, 5.0, 5.125), (4, 5.125, 5.25)}, "and no other's turns"
    assert {row[4]: row[1:3] for row in second["waits"] if row[4] == 3} == {3: (0.0, 0.5)}
    assert (chart["drawn"], chart["attempts_total"]) == (8, 8)


def test_a_chart_of_very_many_turns_has_every_second_lane(episodes, monkeypatch):
    monkeypatch.setattr(gantt_data, "MAX_BARS_PER_STEP", 13)
    chart = Gantt(load_run(episodes)).chart(0)
    for worker in chart["workers"]:
        lanes = {row[0] for name in ("attempts", "waits") for row in worker[name]}
        assert lanes
        assert all(lane % 2 == 0 for lane in lanes)
    assert 0 < chart["drawn"] < chart["attempts_total"]
    assert chart["workers"][1]["tools"] == TOOLS_1, "what is not drawn counts all the same"


def test_the_page_has_curves_of_turns_waits_and_calls(episodes, tmp_path):
    folder = Path(shutil.copytree(episodes, tmp_path / "run"))
    page = write_report(folder)
    data, text = page_data(page), page.read_text(encoding="utf-8")
    facts = data["facts"]
    assert (facts["turns"], facts["wait_s"]) == (2.0, 3.375)
    assert facts["wait_share"] == pytest.approx(0.3375)
    assert (facts["tools_idle_s"], facts["tools_bubble"]) == (6.5, 0.325)
    assert (facts["tool_calls"], facts["failed_calls"]) == (3, 1)
    assert "1 of 3 calls failed (33.3%), including those of responses" in text
    assert "57.5% of the rollouts (32.5% by tools)" in text
    figure = data["figures"]["environment"]
    go.Figure(figure)
    curves = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert curves == {
        "turns per response": [2.0],
        "calls": [3],
        "failed calls": [1],
        "seconds waited": [3.375],
        "waited, of the rollout": [0.3375],
        "devices idle by tools": [0.325],
    }


def test_a_page_without_an_environment_has_no_word_of_tools(made):
    page = write_report(made["exact"])
    assert "environment" not in page_data(page)["figures"]
    tiles = page.read_text(encoding="utf-8").partition("<script>")[0]
    assert "by tools" not in tiles


def test_in_the_timeline_waits_are_inside_their_responses(episodes, tmp_path):
    folder = Path(shutil.copytree(episodes, tmp_path / "run"))
    events = json.loads(write_timeline(folder).read_text(encoding="utf-8"))["traceEvents"]
    whole, waits = defaultdict(list), []
    for event in (each for each in events if each["ph"] == "X"):
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        place = event["pid"], event["tid"], event["args"].get("attempt")
        if event["cat"] == "environment":
            waits.append((place, span))
        elif event["cat"] in ("kept", "aborted"):
            whole[place].append(span)
    assert sorted((place[2], *span) for place, span in waits) == [
        *((0, 0.0, 1.0), (0, 3.0, 6.0), (0, 8.0, 9.0), (1, 0.0, 1.0), (1, 4.0, 5.0)),
        *((2, 0.0, 1.0), (2, 2.0, 4.0), (2, 4.0, 7.0), (3, 0.0, 0.5)),
        *((4, 0.0, 1.0), (4, 1.5, 5.0)),
    ]
    for place, (start, end) in waits:
        assert any(a <= start and end <= b for a, b in whole[place])
    counted = defaultdict(dict)
    for event in (each for each in events if each["ph"] == "C" and each["pid"] == 11):
        counted[event["name"]][event["ts"] / 1e6] = next(iter(event["args"].values()))
    assert counted["running attempts"] == {1.0: 2, 1.5: 1, 2.0: 0}
    waiting = {0.0: 3, 0.5: 2, 1.0: 0, 1.5: 1, 2.0: 2, 4.0: 1, 5.0: 0}
    assert counted["attempts at their environments"] == waiting


def test_a_timeline_of_the_last_steps_has_their_waits_only(episodes, tmp_path):
    folder = Path(shutil.copytree(episodes, tmp_path / "run"))
    more = pl.read_parquet(folder / "samples" / "*.parquet").with_columns(
        attempt=pl.col("attempt") + 10, step=pl.lit(1, pl.Int32)
    )
    pl.concat([pl.read_parquet(folder / "samples" / "*.parquet"), more]).write_parquet(
        folder / "samples" / "step-000000.parquet"
    )
    path = write_timeline(folder, max_attempts=5)
    text = path.read_text(encoding="utf-8")
    assert '"attempt":10' in text
    assert '"cat":"environment"' not in text
    assert "attempts at their environments" not in text
