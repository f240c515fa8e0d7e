"""A run's table of responses: its columns, its files, and how they are read as one. Each step is a
part, ``samples/step-*.parquet``. Readers leave out a *damaged* part and log that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

Say = Callable[[str], None]

REQUIRED: dict[str, pl.DataType] = {
    "prompt": pl.String(),
    "attempt": pl.Int64(),
    "sample_index": pl.Int32(),
    "step": pl.Int32(),
    "round_kind": pl.String(),
    "worker": pl.Int32(),
    "weights_version": pl.Int32(),
    "prompt_tokens": pl.Int32(),
    "tokens": pl.Int32(),
    "reward": pl.Float32(),
    "finish_reason": pl.String(),
    "state": pl.String(),
    "start_s": pl.Float64(),
    "end_s": pl.Float64(),
    "grade_s": pl.Float64(),
    "truncated": pl.Boolean(),
    "advantage": pl.Float32(),
    "stale_tokens": pl.Int32(),
}
"""Columns that every part has. Without one of them a part is damaged. Times are seconds since the
run began. Values come from ``runtime/record/samples.py``.

- ``truncated``: whether the response was cut off at the longest length. It is null if the response
  ended neither by itself nor at that length.
- ``advantage``: the factor of the response in the update, null if it was not trained on.
- ``stale_tokens``: tokens sampled by earlier weights, the oldest of ``weights_version``."""

TEXTS: dict[str, pl.DataType] = {
    "prompt_text": pl.String(),
    "completion": pl.String(),
    "answer": pl.String(),
}
"""The prompt with special tokens, the response without its end, and the reference answer."""

TOKEN_IDS: dict[str, pl.DataType] = {"completion_ids": pl.List(pl.Int32())}

PROGRAM: dict[str, pl.DataType] = {
    "code_verdict": pl.String(),
    "test_verdicts": pl.List(pl.String()),
    "test_cpu_s": pl.List(pl.Float32()),
    "sandbox_level": pl.String(),
    "forgeable": pl.Boolean(),
}
"""More columns if a reward runs programs, null for responses that it did not grade."""

TURNS: dict[str, pl.DataType] = {
    "turn_tokens": pl.List(pl.Int32()),
    "added_tokens": pl.List(pl.Int32()),
    "wait_s": pl.List(pl.Float32()),
    "tool_calls": pl.Int32(),
    "failed_calls": pl.Int32(),
    "messages": pl.String(),
}
"""More columns if there is an environment, with values for each turn. ``messages`` is the ended
conversation after the prompt as JSON, if ``samples.texts`` is set."""

REWARD = "rewards/"
"""The prefix of each reward's own column, which is null if the reward does not apply."""

EXTRA = "extra/"
"""The prefix of each column that a reward function logs, null if it did not."""

PARTS = "samples"


def part(folder: Path, step: int) -> Path:
    """The file of a step's rows."""
    return folder / PARTS / f"step-{step:06d}.parquet"


def step_of(path: Path) -> int:
    """The step of a part."""
    return int(path.stem.removeprefix("step-"))


def files(folder: Path) -> list[Path]:
    """A run's parts, oldest rows first."""
    return sorted((folder / PARTS).glob("step-*.parquet"), key=step_of)


def reward_columns(frame: pl.DataFrame) -> dict[str, str]:
    """The name of each reward function by its column."""
    return {c: c.removeprefix(REWARD) for c in frame.columns if c.startswith(REWARD)}


class DamagedError(ValueError):
    """A part cannot be read. The message names it."""


def query(
    folder: Path, ask: Callable[[pl.LazyFrame], pl.LazyFrame], say: Say | None = None
) -> pl.DataFrame:
    """Return ``ask`` of all rows on disk. The run may be going on.

    Args:
        ask: gets a table with all columns of ``REQUIRED`` and ``TEXTS``.
        say: gets a message for each damaged part, which is left out. None raises ``DamagedError``.
    """
    paths = files(folder)
    try:
        return ask(_table(paths)).collect(engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, FileNotFoundError):
        whole = [path for path in paths if _whole(path, say)]
        if len(whole) == len(paths):
            raise
    return ask(_table(whole)).collect(engine="streaming")


def read(folder: Path) -> pl.DataFrame:
    """All rows on disk. Raises ``DamagedError``."""
    return query(folder, lambda table: table)


def _table(paths: Sequence[Path]) -> pl.LazyFrame:
    """The rows of some parts. A column that a part lacks is null there."""
    known = REQUIRED | TEXTS
    if not paths:
        return pl.LazyFrame(schema=known)
    schemas = [pl.read_parquet_schema(path) for path in paths]
    if any(schema.get(name) != kind for schema in schemas for name, kind in REQUIRED.items()):
        raise pl.exceptions.SchemaError("a part lacks columns")
    merged = {name: kind for schema in (*schemas, known) for name, kind in schema.items()}
    return pl.scan_parquet([*paths], schema=merged, missing_columns="insert")


def _whole(path: Path, say: Say | None) -> bool:
    try:
        schema = pl.read_parquet_schema(path)
        reason = ", ".join(name for name in REQUIRED if schema.get(name) != REQUIRED[name])
        reason = reason and f"lacks the columns {reason}"
        pl.scan_parquet(path).select(pl.all().hash().sum()).collect(engine="streaming")
    except FileNotFoundError:  # the run has deleted it meanwhile
        return False
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        words = " ".join(str(error).split())[:120]
        reason = f"not a whole parquet file ({words})"
    if not reason:
        return True
    if say is None:
        raise DamagedError(f"{path}: {reason}")
    say(f"{path}: {reason}: its rows are missing")
    return False
