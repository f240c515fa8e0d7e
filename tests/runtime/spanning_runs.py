"""Runs whose engines span devices: what their journals and timelines say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.report.run_folder import load_run


def entries(folder: Path) -> list[dict[str, Any]]:
    """Lines of the journal, without those that describe the run."""
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "event" in entry]


def decided(folder: Path, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """Decisions of a kind, with their step."""
    found, step = [], -1
    for entry in entries(folder):
        if entry["event"]["kind"] == "StepStarted":
            step = entry["event"]["step"]
        found += [(step, each) for each in entry["decisions"] if each["kind"] == kind]
    return found


def happened(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    return [entry["event"] for entry in entries(folder) if entry["event"]["kind"] == kind]


def overlaps(folder: Path) -> Iterator[tuple[int, int, int]]:
    """Step, worker and other worker, where the one sums gradients while the other decodes."""
    run = load_run(folder)
    tasks = run.tasks.filter(pl.col("kind") == "accumulate")
    pairs = tasks.join(run.samples, on="step", suffix="_of_sample").filter(
        pl.col("worker") != pl.col("worker_of_sample"),
        pl.col("start_s") < pl.col("end_s_of_sample"),
        pl.col("end_s") > pl.col("start_s_of_sample"),
    )
    yield from pairs.select("step", "worker", "worker_of_sample").unique().iter_rows()


def timeline_rows(folder: Path) -> dict[str, set[str]]:
    """Categories of what the timeline shows of each process."""
    events = json.loads((folder / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].add(event["cat"])
    return found
