"""Read a run folder of our own: ``samples/step-*.parquet`` beside ``journal.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from rollpacker.core.attempts import JournalReader, RecordedAttempt, RecordedTurn
from rollpacker.core.sample_table import REQUIRED
from rollpacker.core.sample_table import files as table_files
from rollpacker.polytrace.formats.files import Reading, Record, read_table, samples, whole_numbers
from rollpacker.polytrace.formats.ours import journal
from rollpacker.polytrace.formats.ours.journal import turn_columns
from rollpacker.polytrace.schema import SAMPLES, Trace, TraceError

NAME = "run"
MARKS = ("prompt", "attempt", "sample_index", "step", "prompt_tokens", "tokens", "state")
_STATES = {"kept": "kept", "dropped": "filtered", "aborted": "aborted", "failed": "aborted"}
_CARRIED = "carried"
"""State of a response that continues as another attempt in a later step, which has all of it."""
_EXTRA = ("attempt", "round_kind", "weights_version", "finish_reason", "state")
_TURNS = ("turn_tokens", "added_tokens", "wait_s")
_NEEDED = ("attempt", "prompt_tokens", "tokens", "finish_reason")


def read(folders: Sequence[Path], reading: Reading) -> Trace:
    """Return one row per attempt. Raises ``TraceError``.

    Items are run folders or tables. A run without a table is read from its journal. ``aborted``
    includes failed attempts. If ``truncated`` is false, an aborted attempt had finished, so its
    length is whole. ``dp_rank`` is the worker. ``end_s`` is the end of decoding.
    """
    found: list[pl.DataFrame] = []
    for path in folders:
        folder = path if path.is_dir() else path.parents[1]
        files = table_files(path) if path.is_dir() else [path]
        if files:
            found.append(_frame(files, folder, reading))
        else:
            reading.note(f"{folder}: no samples/step-*.parquet, read from journal.jsonl")
            found.append(journal.read([folder / "journal.jsonl"], reading).samples)
    return Trace(samples=pl.concat(found) if found else samples([]))


def _frame(files: Sequence[Path], folder: Path, reading: Reading) -> pl.DataFrame:
    given: list[pl.DataFrame] = []
    for path in files:
        # Their texts may be larger than the memory.
        frame = read_table(path, list(REQUIRED), only=True, also=_TURNS)
        whole_numbers(path, frame, ("sample_index", "prompt_tokens", "tokens"))
        frame = frame.filter(pl.col("state") != _CARRIED)
        unknown = set(frame["state"].unique()) - set(_STATES)
        if unknown:
            known = ", ".join(_STATES)
            raise TraceError(f"{path}: state: unknown {unknown.pop()!r}; known: {known}")
        given.append(frame)
    frame = pl.concat(given, how="diagonal_relaxed")
    path = folder / "journal.jsonl"
    told = journal.follow(path) if path.exists() else JournalReader()
    domains = {prompt: each["domain"] for prompt, each in told.prompts.items()}
    ended = pl.when(pl.col("finish_reason").is_in(["stop", "length"])).then(
        pl.col("finish_reason") == "length"
    )
    frame = _with_turns(frame, told)
    extra = pl.struct(pl.struct(*_EXTRA, *_times(frame)).alias(NAME)).struct.json_encode()
    frame = frame.with_columns(_extra=extra, _truncated=ended)
    frame = frame.with_columns(
        task=pl.lit(reading.task),
        index="sample_index",
        domain=pl.col("prompt").replace_strict(domains, default=None, return_dtype=pl.String()),
        response_tokens="tokens",
        cap=pl.lit(told.cap),
        truncated="_truncated",
        state=pl.col("state").replace_strict(_STATES, return_dtype=pl.String()),
        dp_rank="worker",
        reward_s="grade_s",
        reward_kind=pl.lit(_reward_kind(folder)),
        extra="_extra",
    )
    return frame.select(pl.col(name).cast(kind) for name, kind in SAMPLES.items())


def _with_turns(frame: pl.DataFrame, told: JournalReader) -> pl.DataFrame:
    kinds = {name: SAMPLES[name] for name in ("turns", "tools")}
    if not set(_TURNS).issubset(frame.columns):
        return frame.with_columns(pl.lit(None, kind).alias(name) for name, kind in kinds.items())
    acts: dict[int, RecordedAttempt] = {}
    for step in told.steps.values():
        acts |= {number: each for number, each in step.attempts.items() if each.acts}
    rows = [
        _episode(row, acts.get(row["attempt"]))
        for row in frame.select(*_NEEDED, *_TURNS).iter_rows(named=True)
    ]
    kinds |= dict.fromkeys(_TIMES, pl.Float64())
    found = {name: [row.get(name) for row in rows] for name in kinds}
    return frame.hstack(pl.DataFrame(found, schema=kinds))


_TIMES = ("opening_s", "ending_s")


def _times(frame: pl.DataFrame) -> list[str]:
    return [name for name in _TIMES if name in frame.columns]


def _episode(row: Record, told: RecordedAttempt | None) -> Record:
    if row["turn_tokens"] is None:
        return {}
    given = zip(row["turn_tokens"], row["wait_s"], row["added_tokens"], strict=True)
    turns = [RecordedTurn(*turn) for turn in given]
    if (rest := row["tokens"] - sum(turn.tokens for turn in turns)) > 0:
        turns.append(RecordedTurn(rest))  # which was stopped before its end
    extra: Record = {"ending_s": turns[-1].wait_s if turns else 0.0}
    if told is not None and [t.tokens for t in told.turns] == [t.tokens for t in turns]:
        for turn, other in zip(turns, told.turns, strict=True):
            turn.latency_s = other.latency_s
        extra["opening_s"] = told.opening_s
    return turn_columns(row["prompt_tokens"], turns, row["finish_reason"]) | extra


def _reward_kind(folder: Path) -> str | None:
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = [reward["function"] for reward in tree["rewards"]]
        return "+".join([*names, *(["environment"] if tree.get("environment") else [])])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: rewards: cannot be read ({json.dumps(str(error))})") from error
