"""The demo's steps on emulated GPUs, and where its report shows them."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollpacker.demo.cluster import SETTING, cluster_table, remarks, run_cluster
from rollpacker.emulate.twin import simulate
from rollpacker.report.compare import emulated_step
from rollpacker.runtime.record.progress import Progress

FAST = replace(SETTING, factor=200.0)


def result(step_s: float, honest: bool = True) -> dict[str, Any]:
    return {"step_s": step_s, "rollout_s": 70.4, "mean_length": 1089.0, "honest": honest}


@pytest.mark.parametrize(
    ("late", "steps", "ratios"),
    [
        ((), ("125", "110", "65"), ("1.00x", "1.14x", "1.92x")),
        (("race",), ("125", "110", "too busy"), ("1.00x", "1.14x", "too busy")),
        (("off",), ("too busy", "110", "65"), ("too busy",) * 3),
    ],
)
def test_no_ratio_is_of_an_emulation_that_was_late(
    late: tuple[str, ...], steps: tuple[str, ...], ratios: tuple[str, ...]
) -> None:
    seconds = {"off": 125.0, "exact": 110.0, "race": 65.0}
    results = {mode: result(each, mode not in late) for mode, each in seconds.items()}
    rows = {label: tuple(cells) for label, *cells in cluster_table(results)}
    assert rows[""] == ("off, early grading", "exact", "race")
    assert rows["a step, s"] == steps
    assert rows["against off"] == ratios
    assert rows["mean length"] == ("1,089",) * 3
    *_, last = remarks(results)
    if late:
        assert f"WARNING this machine was too busy to emulate {late[0]}, so" in last
        assert "Repeat on an idle machine" in last
        assert "x" not in last.replace("exact", "")
    else:
        assert "adds 98 s per step" in last
        assert "exact is 2.03x, race is 3.43x" in last


@pytest.mark.wide
def test_exact_keeps_what_off_keeps_in_less_time(tmp_path: Path) -> None:
    quiet = Progress(Console(file=StringIO()))
    results = run_cluster(tmp_path, ["off", "exact"], quiet, FAST)
    off, exact = results["off"], results["exact"]
    assert off["mean_length"] == exact["mean_length"] > 0

    # On the simulator's clock, which no other work on this machine disturbs.
    steady = {m: [s.step_s for s in simulate(Path(r["run"]))[1:]] for m, r in results.items()}
    assert len(steady["off"]) == 2
    assert sum(steady["off"]) / sum(steady["exact"]) >= 1.1

    gantt = emulated_step(results).gantt
    assert gantt is not None
    assert [chart["name"] for chart in gantt["charts"]] == ["off", "exact"]
    assert all(len(chart["workers"]) == 16 for chart in gantt["charts"])
