from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.report.reading import bubbles
from rollpacker.report.reading.run_folder import load_run

spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=30,
)


def covered(intervals, unit: int) -> bool:
    return any(start <= unit < end for start, end in intervals)


@given(spans)
def test_union_and_gaps_split_the_time_line(intervals):
    busy = bubbles.union(intervals)
    free = bubbles.gaps(busy, 5.0, 30.0)
    for unit in range(60):
        assert covered(busy, unit) == covered(intervals, unit)
        assert covered(free, unit) == (5 <= unit < 30 and not covered(intervals, unit))
    assert (np.diff(busy.ravel()) > 0).all(), "sorted and disjoint"
    assert bubbles.total(busy) == sum(covered(intervals, unit) for unit in range(60))


@given(spans.map(lambda some: [(a, b) for a, b in some if b > a]))
def test_lanes_never_overlap_and_are_as_few_as_possible(intervals):
    lanes = bubbles.lanes(intervals)
    for lane in set(lanes):
        mine = sorted(span for span, at in zip(intervals, lanes, strict=True) if at == lane)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    most = max((sum(a <= t < b for a, b in intervals) for t in range(60)), default=0)
    assert len(set(lanes)) == most


def test_lanes_of_a_round_are_a_staircase():
    assert bubbles.lanes([(0, 1), (0, 3), (0, 2), (1, 2)]) == [2, 0, 1, 2]


def test_a_migrated_attempt_is_split_between_its_workers():
    samples = pl.DataFrame(
        [(0, 1, 0, 0.0, 9.0), (0, 2, 1, 0.0, 5.0)], schema=bubbles.SEGMENT_COLUMNS, orient="row"
    )
    moves = pl.DataFrame({"attempt": [1, 1, 1], "worker": [1, 2, 0], "t": [0.0, 4.0, 6.0]})
    stays = bubbles.segments(samples, moves)
    assert stays.rows() == [
        (0, 1, 0, 6.0, 9.0),
        (0, 1, 1, 0.0, 4.0),
        (0, 2, 1, 0.0, 5.0),
        (0, 1, 2, 4.0, 6.0),
    ]


def test_what_an_engine_decodes_is_on_all_devices_that_were_put_together():
    samples = pl.DataFrame(
        [(0, 1, 0, 0.0, 9.0), (0, 2, 1, 0.0, 5.0), (1, 3, 0, 10.0, 12.0)],
        schema=bubbles.SEGMENT_COLUMNS,
        orient="row",
    )
    moves = pl.DataFrame({"attempt": [1, 1], "worker": [1, 0], "t": [0.0, 6.0]})
    rows = {"step": [0, 0], "lead": [0, 0], "worker": [1, 1], "t": [5.5, 7.0]}
    stays = bubbles.segments(samples, moves, pl.DataFrame(rows))
    assert stays.rows() == [
        (0, 1, 0, 6.0, 9.0),
        (0, 1, 1, 0.0, 6.0),
        (0, 2, 1, 0.0, 5.0),
        (0, 1, 1, 6.0, 9.0),
        (1, 3, 0, 10.0, 12.0),
    ]


def test_gradients_count_as_work_and_the_rest_is_bubble():
    samples = pl.DataFrame(
        [(3, 1, 0, 10.0, 20.0), (3, 2, 1, 10.0, 14.0)],
        schema=bubbles.SEGMENT_COLUMNS,
        orient="row",
    )
    tasks = pl.DataFrame({"step": [3, 3], "worker": [1, 0], "start_s": [15.0, 21.0]})
    tasks = tasks.with_columns(end_s=pl.Series([18.0, 24.0]))
    rounds = pl.DataFrame({"step": [3], "start_s": [10.0], "rollout_end_s": [20.5]})
    windows = bubbles.step_windows(samples, tasks, rounds)
    assert windows == {3: (10.0, 20.5, 24.0)}
    rows = {row["worker"]: row for row in _measured(samples, tasks, windows)}
    assert rows[0] == row(0, rollout_idle_s=0.5, step_idle_s=1.0, decode_s=10.0, gradient_s=3.0)
    assert rows[1] == row(1, rollout_idle_s=3.5, step_idle_s=7.0, decode_s=4.0, gradient_s=3.0)
    measured = bubbles.worker_bubbles(samples, tasks, windows)
    fractions = bubbles.bubble_fractions(measured).row(0)
    assert fractions == pytest.approx((3, 4.0 / 21.0, 8.0 / 28.0, 0.0))


def _measured(samples, tasks, windows):
    return bubbles.worker_bubbles(samples, tasks, windows).to_dicts()


def row(worker, **more):
    same = {"rollout_s": 10.5, "rollout_tools_s": 0.0, "step_s": 14.0}
    return {"step": 3, "worker": worker} | same | more


@pytest.mark.parametrize("mode", ["off", "exact", "race"])
def test_bubbles_of_a_run_are_what_the_run_counted_itself(made, mode):
    run = load_run(made[mode])
    windows = bubbles.step_windows(run.samples, run.tasks, run.rounds)
    stays = bubbles.segments(run.samples, run.moves)
    measured = bubbles.worker_bubbles(stays, run.tasks, windows)
    counted = [line["bubble/rollout_fraction"] for line in run.metrics]
    found = bubbles.bubble_fractions(measured)["rollout_fraction"].to_list()
    assert found == pytest.approx(counted, abs=1e-4)
    assert mode == "race" or max(found) > 0.1
