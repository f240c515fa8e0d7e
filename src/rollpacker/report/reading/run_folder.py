"""Read the files of a run into tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
import yaml

from rollpacker.core import journal
from rollpacker.core import sample_table as schema
from rollpacker.core import sample_table as table
from rollpacker.core.attempts import RecordedStep, read_journal
from rollpacker.errors import words_of


class ReportError(ValueError):
    """A run folder cannot be reported on. The message names the file and its mistake."""


TASK_COLUMNS = {
    "step": pl.Int64,
    "worker": pl.Int64,
    "prompts": pl.Int64,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
    "kind": pl.String,
}
FORMED_COLUMNS = {"step": pl.Int64, "lead": pl.Int64, "worker": pl.Int64, "t": pl.Float64}
MOVE_COLUMNS = {"attempt": pl.Int64, "step": pl.Int64, "worker": pl.Int64, "t": pl.Float64}
ROUND_COLUMNS = {"step": pl.Int64, "start_s": pl.Float64, "rollout_end_s": pl.Float64}
WAIT_COLUMNS = {
    "attempt": pl.Int64,
    "step": pl.Int64,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
}


_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The C loader takes a tenth of the time."""
_Replicas = dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The meaning of a number in a table's column ``worker``. A ``worker`` is an engine and the
    replica on its devices. Times count for each of its ``devices``."""

    kind: Literal["worker", "engine", "replica"]
    number: int
    devices: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The tables of one run. Times are seconds since the run began.

    Args:
        metrics: one object per step, by step. For a step that was repeated, the last.
        samples: one row per attempt: the columns of ``core/sample_table.py`` without texts.
        missing: number of a step's responses without a row, because a part is gone or damaged.
        moves: start and migrations of the attempts that changed workers.
        formed: workers whose devices were joined.
        waits: attempts' waits for their environment. The end is null if the attempt ended with it.
        summary: empty while the run has not finished.
        places: the workers of these tables if engines and replicas are separate. Replicas are
            numbered after the engines.
    """

    path: Path
    config_text: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: pl.DataFrame
    missing: dict[int, int]
    tasks: pl.DataFrame
    moves: pl.DataFrame
    formed: pl.DataFrame
    rounds: pl.DataFrame
    waits: pl.DataFrame
    summary: dict[str, Any]
    places: Mapping[int, WorkerPlace] = field(default_factory=dict[int, WorkerPlace])

    def place(self, worker: int) -> WorkerPlace:
        return self.places.get(worker) or WorkerPlace("worker", worker)


def load_run(path: Path, say: Callable[[str], None] = lambda _line: None) -> RunFolder:
    """Read a run folder. ``say`` gets a line for damaged sample files, whose rows are left out.
    Raises ``ReportError`` with one line on a missing or damaged file."""
    if not path.is_dir():
        raise ReportError(f"{path}: no such run folder")
    config_text, config = _read_config(path / "config.yaml")
    metrics = _read_metrics(path / "metrics.jsonl")
    samples = _read_samples(path, say)
    replicas, tasks = _read_tasks(path / "workers.jsonl")
    acts = config.get("environment") is not None
    journal_path = _need(path / "journal.jsonl")
    try:
        told = read_journal(journal_path).steps
    except ValueError as error:
        raise ReportError(words_of(error)) from None
    moves, formed, rounds, waits = _journal_tables(told.values(), acts=acts)
    summary = _read_summary(path / "summary.json")
    steps = [line["step"] for line in metrics]
    places = _places(replicas, {*samples["worker"], *moves["worker"], *formed["worker"]})
    return RunFolder(
        path=path,
        config_text=config_text,
        config=config,
        metrics=metrics,
        samples=samples,
        missing=_missing(
            samples,
            {number: step.started for number, step in told.items()},
            steps,
            whole=summary.get("steps") == steps[-1] + 1,
        ),
        tasks=_numbered_on(tasks, places),
        moves=moves,
        formed=formed,
        rounds=rounds,
        waits=waits,
        summary=summary,
        places=places,
    )


def _need(path: Path) -> Path:
    if not path.is_file():
        raise ReportError(f"{path}: missing. Is {path.parent} the folder of a run?")
    return path


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = _need(path).read_text(encoding="utf-8")
        config = yaml.load(text, _LOADER)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ReportError(f"{path}: cannot be read as YAML: {words_of(error)}") from None
    if not isinstance(config, dict):
        raise ReportError(f"{path}: expected keys and values, found {type(config).__name__}")
    return text, config


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from journal.read_all(_need(path))
    except ValueError as error:
        raise ReportError(words_of(error)) from None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for where, line in _read_lines(path):
        if not isinstance(line.get("step"), int):
            raise ReportError(f"{where}: no whole number under 'step'")
        by_step[line["step"]] = line
    if not by_step:
        raise ReportError(f"{path}: empty, no step has finished yet")
    return [by_step[step] for step in sorted(by_step)]


def _read_samples(path: Path, say: Callable[[str], None]) -> pl.DataFrame:
    if not schema.files(path):
        raise ReportError(f"{path}: no samples/step-*.parquet")
    said: list[str] = []
    try:
        rows = table.query(path, _light, said.append)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ReportError(f"{path}: samples cannot be read ({words_of(error)})") from None
    for line in said:
        say(line)
    return rows.sort("step", "start_s", "attempt")


def _light(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Drop texts and widen numbers, so that sums and differences do not overflow."""
    heavy = (*schema.TEXTS, *schema.TOKEN_IDS, "messages")
    return rows.select(pl.exclude(*heavy)).with_columns(
        pl.col(pl.Int32).cast(pl.Int64), pl.col(pl.Float32).cast(pl.Float64)
    )


def _missing(
    samples: pl.DataFrame, started: Mapping[int, int], steps: Sequence[int], *, whole: bool
) -> dict[int, int]:
    """Count started responses without a row, by step. Without a ``whole`` run, rows of the last
    step on disk and of later ones may still be unwritten."""
    found = dict(samples.group_by("step").len().iter_rows())
    last = steps[-1] if whole or not found else max(found) - 1
    lacking = {step: started.get(step, 1) - found.get(step, 0) for step in steps if step <= last}
    return {step: count for step, count in lacking.items() if count > 0}


def _read_tasks(path: Path) -> tuple[_Replicas, pl.DataFrame]:
    rows: list[tuple[Any, ...]] = []
    replicas: _Replicas = {}
    for where, line in _read_lines(path):
        prompts = line.get("prompts", 0)
        row = line | {"prompts": len(prompts) if isinstance(prompts, list) else prompts}
        lacking = [name for name in TASK_COLUMNS if name not in row]
        separate = line.get("role") == "replica"
        lacking += [name for name in ("devices", "engine_devices") if separate and name not in line]
        if lacking:
            raise ReportError(f"{where}: no '{lacking[0]}'")
        if separate:
            replicas[line["worker"]] = (line["devices"], line["engine_devices"])
        rows.append((*(row[name] for name in TASK_COLUMNS), separate))
    schema = TASK_COLUMNS | {"separate": pl.Boolean}
    tasks = pl.DataFrame(rows, schema=schema, orient="row", strict=False)
    return replicas, tasks.sort("start_s")


def _places(replicas: _Replicas, engines: set[int]) -> dict[int, WorkerPlace]:
    if not replicas:
        return {}
    first = max(engines, default=-1) + 1
    (_, devices), *_ = replicas.values()
    return {engine: WorkerPlace("engine", engine, devices) for engine in sorted(engines)} | {
        first + replica: WorkerPlace("replica", replica, own)
        for replica, (own, _) in sorted(replicas.items())
    }


def _numbered_on(tasks: pl.DataFrame, places: Mapping[int, WorkerPlace]) -> pl.DataFrame:
    first = min((n - p.number for n, p in places.items() if p.kind == "replica"), default=0)
    worker = pl.col("worker") + first * pl.col("separate").cast(pl.Int64)
    return tasks.with_columns(worker).select(TASK_COLUMNS.keys())


def _journal_tables(
    steps: Iterable[RecordedStep], *, acts: bool
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    moves: list[tuple[int, int, int, float]] = []
    formed: list[tuple[int, int, int, float]] = []
    rounds: list[tuple[int, float, float | None]] = []
    waits: list[tuple[int, int, float, float | None]] = []
    for step in steps:
        rounds.append((step.number, step.start_s, step.rollout_end_s))
        formed += [(step.number, *each) for each in step.formed]
        for number, attempt in step.attempts.items():
            if len(attempt.stays) > 1:
                moves += [(number, step.number, *stay) for stay in attempt.stays]
            if acts:
                # An attempt without recorded waits never decoded: it waited all its time.
                spans = attempt.waits or ((attempt.start_s, None),)
                waits += [(number, step.number, begun, over) for begun, over in spans]
    return (
        pl.DataFrame(moves, schema=MOVE_COLUMNS, orient="row"),
        pl.DataFrame(formed, schema=FORMED_COLUMNS, orient="row"),
        pl.DataFrame(sorted(rounds), schema=ROUND_COLUMNS, orient="row"),
        pl.DataFrame(waits, schema=WAIT_COLUMNS, orient="row"),
    )


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path}: not JSON ({words_of(error)})") from None
    if not isinstance(found, dict):
        raise ReportError(f"{path}: expected a JSON object")
    return found
