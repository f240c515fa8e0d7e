"""The demo's step on emulated GPUs, and where its report shows it."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollpacker.demo.cluster import cluster_table, run_cluster
from rollpacker.emulate.paper_job import Paper
from rollpacker.report.compare import emulated_step
from rollpacker.runtime.record.progress import Progress

FEW = Paper(calibration="paper-7b-8k", workload="paper-8k", gpus=4, factor=200.0)


@pytest.mark.wide
def test_exact_keeps_what_off_keeps_in_less_time(tmp_path: Path) -> None:
    quiet = Progress(Console(file=StringIO()))
    results = run_cluster(tmp_path, ["off", "exact"], quiet, FEW)
    off, exact = results["off"], results["exact"]
    assert off["kept_tokens"] == exact["kept_tokens"] > 0
    assert exact["step_s"] < off["step_s"]
    assert off["grade_wait_s"] > 50  # the paper's phase of rewards

    rows = {label: cells for label, *cells in cluster_table(results)}
    assert rows[""] == ["off", "exact"]
    assert rows["against off"] == ["1.00x", f"{off['step_s'] / exact['step_s']:.2f}x"]
    assert rows["against off, grading aside"][0] == "1.00x"
    early = float(rows["against off, grading aside"][1][:-1])
    assert 0.0 < early < off["step_s"] / exact["step_s"]

    picture = emulated_step(results).picture
    assert picture.startswith("<svg")
    assert "off: everybody waits" in picture
    assert "device 3" in picture
    assert "device 4" not in picture
