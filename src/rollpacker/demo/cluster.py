"""What two cores cannot show: one step of a 7B model on 16 emulated GPUs, in each mode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.emulate.paper_job import Paper, paper_job
from rollpacker.job import train
from rollpacker.runtime.record.progress import Progress

SETTING = Paper(calibration="paper-7b-8k", workload="paper-8k", gpus=16, factor=25.0)
TITLE = "One step of a 7B model on 16 emulated GPUs"
NOTE = (
    "Driver, policies and grading are real; decode times and lengths are the RollPacker paper's, "
    "seconds are emulated, nothing is trained. race shows a short round: what it stopped is "
    "sampled again in a long round, one of some steps, so over many steps it gains less than here."
)


def run_cluster(
    out: Path, modes: Sequence[str], progress: Progress, setting: Paper = SETTING
) -> dict[str, Any]:
    """What a step takes in each mode, by mode; the runs are below ``out``."""
    return {
        mode: _result(train(paper_job(setting, mode, out), progress=progress)) for mode in modes
    }


def _result(run: Path) -> dict[str, Any]:
    line = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {
        "run": str(run),
        "step_s": line["step_time"],
        "rollout_s": line["timing_s/rollout"],
        "grade_wait_s": line["timing_s/grade_wait"],
        "kept_tokens": summary["kept_tokens"],
    }


def cluster_table(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of text: a header, then one row per measure."""

    def early(each: Mapping[str, Any]) -> float:
        """Of a trainer that grades while it decodes."""
        return each["step_s"] - each["grade_wait_s"]

    off = results["off"]
    rows = [("", *results)]
    for label, value in (
        ("a step, s", lambda each: f"{each['step_s']:.0f}"),
        ("of which decoding, s", lambda each: f"{each['rollout_s'] - each['grade_wait_s']:.0f}"),
        ("of which only grading, s", lambda each: f"{each['grade_wait_s']:.0f}"),
        ("against off", lambda each: f"{off['step_s'] / each['step_s']:.2f}x"),
        ("against off, grading aside", lambda each: f"{early(off) / early(each):.2f}x"),
        ("kept tokens", lambda each: f"{each['kept_tokens']:,}"),
    ):
        rows.append((label, *(value(each) for each in results.values())))
    return rows
