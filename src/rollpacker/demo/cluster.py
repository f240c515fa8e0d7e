"""Emulated steps of a 7B model on 16 GPUs in each mode, which two cores cannot show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rollpacker.emulate.paper_job import Paper, paper_job
from rollpacker.job import train
from rollpacker.runtime.record.progress import Progress

SETTING = Paper(calibration="paper-7b-8k", workload="paper-8k", gpus=16, factor=12.0, steps=3)
_RACED = 0.4
"""Share of the factor. A raced rollout is so short that the driver could not keep up with all."""
TITLE = "A step of a 7B model on 16 emulated GPUs"
_STEADY = 1  # the first step that counts. Before it, a run has no history of lengths.
_EARLY = {"grading": {"asynchronous": True}}
_NOTE = (
    "Driver, policies and grading are real. Decode times and lengths are the RollPacker paper's. "
    "Seconds are emulated, and nothing is trained. The times are the mean of the steps after the "
    "first. race shows short rounds only: once in several steps a long round samples the stopped "
    "prompts again, so over many steps race gains less than here."
)


def run_cluster(
    out: Path, modes: Sequence[str], progress: Progress, setting: Paper = SETTING
) -> dict[str, Any]:
    """Return the times of a step by mode. The runs are written below ``out``. All of them,
    including ``off``, grade responses while others decode."""
    found: dict[str, Any] = {}
    for mode in modes:
        factor = setting.factor * (_RACED if mode == "race" else 1.0)
        job = paper_job(replace(setting, factor=factor), mode, out, _EARLY)
        found[mode] = _result(train(job, progress=progress))
    return found


def _result(run: Path) -> dict[str, Any]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steady = [json.loads(line) for line in lines[_STEADY:]]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {
        "run": str(run),
        "honest": summary["emulated"]["honest"],
        "step_s": fmean(line["step_time"] for line in steady),
        "rollout_s": fmean(line["timing_s/rollout"] for line in steady),
        "mean_length": fmean(line["completions/mean_length"] for line in steady),
    }


def cluster_table(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of text: a header, then one row per measure."""

    def told(text: str, *of: Mapping[str, Any]) -> str:
        return text if all(each["honest"] for each in of) else "too busy"

    off = results["off"]
    columns = [("", "a step, s", "of which rollout, s", "against off", "mean length")]
    for mode, each in results.items():
        columns.append(
            (
                "off, early grading" if mode == "off" else mode,
                told(f"{each['step_s']:.0f}", each),
                told(f"{each['rollout_s']:.0f}", each),
                told(f"{off['step_s'] / each['step_s']:.2f}x", each, off),
                f"{each['mean_length']:,.0f}",
            )
        )
    return list(zip(*columns, strict=True))


def remarks(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines below the table."""
    busy = [mode for mode, each in results.items() if not each["honest"]]
    if busy:
        return [
            _NOTE,
            f"WARNING this machine was too busy to emulate {', '.join(busy)}, so its times and "
            "ratios are not shown. Repeat on an idle machine: rollpacker demo",
        ]
    late_s = SETTING.costs.synchronous_reward_s
    base_s = results["off"]["step_s"] + late_s
    ratios = [f"{m} is {base_s / each['step_s']:.2f}x" for m, each in results.items() if m != "off"]
    return [
        _NOTE,
        f"The paper's baseline grades after the rollout, which adds {late_s:.0f} s per step. "
        f"Against it, {', '.join(ratios)}.",
    ]
