"""What a real run's journal and metrics tell of time: decoding, grading, gradients, updates."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from rollpacker.core import journal
from rollpacker.core.types import PromptId
from rollpacker.polytrace.compare import METRICS
from rollpacker.sim.recorded.run_reader import Reader, RunStep


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Args:
        name: of its folder.
        settings: the policy's, as in the journal.
        state: the policy's at the start.
        steps: those that ended, in order.
        prompt_tokens: of every prompt.
        cores: that workers share with the driver; 0 where it has its own, or where nothing says so.
        max_running: most sequences that an engine decoded together; None where nothing says so.
    """

    name: str
    settings: dict[str, Any]
    state: dict[str, Any]
    steps: tuple[RunStep, ...]
    prompt_tokens: dict[PromptId, int]
    cores: int = 0
    max_running: int | None = None


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run of ours, with times."""
    return (path / "journal.jsonl").is_file() and (path / "metrics.jsonl").is_file()


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ``ValueError`` when it is none or no step has ended."""
    path = folder / "journal.jsonl"
    if not is_run(folder):
        raise ValueError(f"{folder}: not a run's folder: journal.jsonl and metrics.jsonl expected")
    cores = shared_cores(folder)
    most = _max_running(folder)
    reader = Reader(cores, most or sys.maxsize)
    meta: dict[str, Any] | None = None
    for _, line in journal.read_all(path):
        if "meta" in line:
            meta = line["meta"] if meta is None else meta
            reader.configure(line["meta"])
        else:
            reader.take(float(line["t"]), line["event"], line["decisions"])
    measured = _metrics(folder / "metrics.jsonl")
    steps: list[RunStep] = []
    for number, step in sorted(reader.steps.items()):
        step.measured = measured.get(number, {})
        if step.end_s is not None and len(step.measured) == len(METRICS):
            steps.append(step)
    if meta is None or not steps:
        raise ValueError(f"{folder}: no step of this run has ended, nothing was timed")
    name = folder.resolve().name
    settings, state = meta["settings"], meta["state"]
    return RunRecord(name, settings, state, tuple(steps), reader.prompt_tokens, cores, most)


def shared_cores(folder: Path) -> int:
    """Of a run's folder; 0 where the driver had cores of its own, or where nothing says so."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    cores = cast(dict[str, Any], summary).get("cores")
    return cores["all"] if cores and cores["workers"] >= cores["all"] else 0


def _max_running(folder: Path) -> int | None:
    try:
        config: Any = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    try:
        return config["engine"].get("max_running")
    except (AttributeError, KeyError, TypeError):  # of another kind of file
        return None


def _metrics(path: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for _, line in journal.read(path):
        if line.get("emulated"):
            raise ValueError(
                f"{path}: an emulated run (devices.emulate): its times are a calibration's, they "
                "measure no device"
            )
        found[line["step"]] = {
            phase: float(line[key]) for phase, key in METRICS.items() if key in line
        }
    return found
