"""Reading what a run left behind: files in, tables out; no live objects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from rollpacker.core import journal


class ReportError(ValueError):
    """A run folder cannot be reported on; the message names the file and what is wrong."""


SAMPLE_COLUMNS = {
    "prompt": pl.String,
    "attempt": pl.Int64,
    "sample_index": pl.Int64,
    "step": pl.Int64,
    "round_kind": pl.String,
    "worker": pl.Int64,
    "weights_version": pl.Int64,
    "prompt_tokens": pl.Int64,
    "tokens": pl.Int64,
    "reward": pl.Float64,
    "finish_reason": pl.String,
    "state": pl.String,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
    "grade_s": pl.Float64,
}
PROGRAM_COLUMNS = {
    "code_verdict": pl.String,
    "test_verdicts": pl.List(pl.String),
    "test_cpu_s": pl.List(pl.Float64),
    "sandbox_level": pl.String,
    "forgeable": pl.Boolean,
}
"""Of a run with a reward that runs programs; other runs have none of them."""
TASK_COLUMNS = {
    "step": pl.Int64,
    "worker": pl.Int64,
    "prompts": pl.Int64,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
    "kind": pl.String,
}
MOVE_COLUMNS = {"attempt": pl.Int64, "step": pl.Int64, "worker": pl.Int64, "t": pl.Float64}
ROUND_COLUMNS = {"step": pl.Int64, "start_s": pl.Float64, "rollout_end_s": pl.Float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The tables of one run; times are seconds since the run began.

    Args:
        path: the folder.
        config_text: ``config.yaml`` as written.
        config: the same, parsed.
        metrics: one object a step, by step; of a step that was repeated, the last.
        samples: one row per attempt (``SAMPLE_COLUMNS``, maybe ``PROGRAM_COLUMNS``).
        tasks: one row per gradient task on a worker (``TASK_COLUMNS``).
        moves: start and migrations of the attempts that changed workers (``MOVE_COLUMNS``).
        rounds: when each step's rollout began and ended (``ROUND_COLUMNS``).
        summary: ``summary.json``; empty while the run has not finished.
    """

    path: Path
    config_text: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: pl.DataFrame
    tasks: pl.DataFrame
    moves: pl.DataFrame
    rounds: pl.DataFrame
    summary: dict[str, Any]


def load_run(path: Path) -> RunFolder:
    """Read a run folder. Raises ``ReportError`` with one line on a missing or damaged file."""
    if not path.is_dir():
        raise ReportError(f"{path}: no such run folder")
    config_text, config = _read_config(path / "config.yaml")
    metrics = _read_metrics(path / "metrics.jsonl")
    samples = _read_samples(path)
    tasks = _read_tasks(path / "workers.jsonl")
    moves, rounds = _read_journal(path / "journal.jsonl")
    return RunFolder(
        path=path,
        config_text=config_text,
        config=config,
        metrics=metrics,
        samples=samples,
        tasks=tasks,
        moves=moves,
        rounds=rounds,
        summary=_read_summary(path / "summary.json"),
    )


def _need(path: Path) -> Path:
    if not path.is_file():
        raise ReportError(f"{path}: missing; is {path.parent} the folder of a run?")
    return path


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = _need(path).read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ReportError(f"{path}: cannot be read as YAML: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise ReportError(f"{path}: expected keys and values, found {type(config).__name__}")
    return text, config


def _read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file; a last line that a crash tore is left out."""
    lines: list[tuple[int, dict[str, Any]]] = []
    try:
        for number, line in journal.read(_need(path)):
            if not isinstance(line, dict):
                raise ReportError(f"{path}, line {number}: expected a JSON object")
            lines.append((number, line))
    except (journal.JournalError, UnicodeDecodeError) as error:
        message = _one_line(error)
        raise ReportError(message if str(path) in message else f"{path}: {message}") from None
    return lines


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in _read_lines(path):
        if not isinstance(line.get("step"), int):
            raise ReportError(f"{path}, line {number}: no whole number under 'step'")
        by_step[line["step"]] = line
    if not by_step:
        raise ReportError(f"{path}: empty, no step has finished yet")
    return [by_step[step] for step in sorted(by_step)]


def _read_samples(path: Path) -> pl.DataFrame:
    """All rows; a run that is going on, or died while merging, has parts beside the whole."""
    parts = sorted((path / "samples").glob("part-*.parquet"))
    files = [file for file in (path / "samples.parquet", *parts) if file.is_file()]
    if not files:
        raise ReportError(f"{path}: neither samples.parquet nor samples/part-*.parquet")
    rows = pl.concat([_read_parquet(file) for file in files])
    kept = rows.unique("attempt", keep="first").sort("step", "start_s", "attempt")
    if not (kept["state"] == "kept").any():
        raise ReportError(f"{files[0]}: no kept attempt, so there is nothing to report yet")
    return kept


def _read_parquet(file: Path) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(file)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ReportError(f"{file}: not a whole parquet file ({_one_line(error)[:120]})") from None
    lacking = [name for name in SAMPLE_COLUMNS if name not in frame.columns]
    if lacking:
        raise ReportError(f"{file}: lacks the columns {', '.join(lacking)}")
    columns = SAMPLE_COLUMNS | {n: k for n, k in PROGRAM_COLUMNS.items() if n in frame.columns}
    try:
        return frame.select(pl.col(name).cast(kind) for name, kind in columns.items())
    except pl.exceptions.PolarsError as error:
        raise ReportError(f"{file}: a column has the wrong type: {_one_line(error)}") from None


def _read_tasks(path: Path) -> pl.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for number, line in _read_lines(path):
        prompts = line.get("prompts", 0)
        row = line | {"prompts": len(prompts) if isinstance(prompts, list) else prompts}
        lacking = [name for name in TASK_COLUMNS if name not in row]
        if lacking:
            raise ReportError(f"{path}, line {number}: no '{lacking[0]}'")
        rows.append(tuple(row[name] for name in TASK_COLUMNS))
    return pl.DataFrame(rows, schema=TASK_COLUMNS, orient="row", strict=False).sort("start_s")


class _JournalReader:
    """Collects what the report needs; of a step that a crash repeated, the last try."""

    def __init__(self) -> None:
        self.step = -1
        self.routes: dict[int, list[tuple[int, int, int, float]]] = {}
        self.rounds: dict[int, list[float | None]] = {}

    def take(self, line: dict[str, Any]) -> None:
        now, event = float(line["t"]), line["event"]
        if event["kind"] == "StepStarted":
            self.step = event["step"]
            self.rounds[self.step] = [now, None]
        elif event["kind"] == "AttemptMigrated":
            attempt = event["attempt"]
            self.routes[attempt].append((attempt, self.step, event["worker"], now))
        for decision in line["decisions"]:
            if decision["kind"] == "StartAttempt":
                attempt = decision["attempt"]
                self.routes[attempt] = [(attempt, self.step, decision["worker"], now)]
            elif decision["kind"] == "FinishRollout":
                self.rounds[self.step][1] = now

    def tables(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        moves = [stay for route in self.routes.values() if len(route) > 1 for stay in route]
        rounds = [(step, *times) for step, times in sorted(self.rounds.items())]
        return (
            pl.DataFrame(moves, schema=MOVE_COLUMNS, orient="row"),
            pl.DataFrame(rounds, schema=ROUND_COLUMNS, orient="row"),
        )


def _read_journal(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    reader = _JournalReader()
    for number, line in _read_lines(path):
        if "meta" in line:
            continue
        try:
            reader.take(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{path}, line {number}: not a journal line ({error!r})") from None
    return reader.tables()


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    lines = _read_json(path)
    if not isinstance(lines, dict):
        raise ReportError(f"{path}: expected a JSON object")
    return lines


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path}: not JSON ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
