"""A run's table of responses: its columns, its files, and how they are read as one.

Each step is a part, ``samples/step-*.parquet``. Parts may lack columns or have more, by what was
chosen to be kept. A part that cannot be read is *damaged*: readers leave it out and say so.
"""

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
"""Columns that every part has, and without which it is damaged; times are seconds since the
run began. Values come from ``runtime/record/samples.py``.

``truncated``: cut off at the longest length, null where the response did not end by itself or by
that; ``advantage``: what the update multiplied it by, null where it was not trained on;
``stale_tokens``: those of earlier weights than the step's, the oldest of ``weights_version``."""

TEXTS: dict[str, pl.DataType] = {
    "prompt_text": pl.String(),
    "completion": pl.String(),
    "answer": pl.String(),
}
"""The prompt as the model saw it, special tokens included, the response without what ends
it, and the problem's reference answer."""

TOKEN_IDS: dict[str, pl.DataType] = {"completion_ids": pl.List(pl.Int32())}

PROGRAM: dict[str, pl.DataType] = {
    "code_verdict": pl.String(),
    "test_verdicts": pl.List(pl.String()),
    "test_cpu_s": pl.List(pl.Float32()),
    "sandbox_level": pl.String(),
    "forgeable": pl.Boolean(),
}
"""More columns, where a reward runs programs; null for responses that it did not grade."""

TURNS: dict[str, pl.DataType] = {
    "turn_tokens": pl.List(pl.Int32()),
    "added_tokens": pl.List(pl.Int32()),
    "wait_s": pl.List(pl.Float32()),
    "tool_calls": pl.Int32(),
    "failed_calls": pl.Int32(),
    "messages": pl.String(),
}
"""More columns, where an environment takes part: for each turn the tokens sampled, those of the
environment's answer and the seconds that it took; tools called; the conversation behind the prompt
as JSON, once it is over (``samples.texts``)."""

REWARD = "rewards/"
"""Begins the name of each reward's own column; null where it does not apply."""

EXTRA = "extra/"
"""Begins the name of each column that a reward function logs; null where it did not."""

PARTS = "samples"


def part(folder: Path, step: int) -> Path:
    """The file that has a step's rows."""
    return folder / PARTS / f"step-{step:06d}.parquet"


def step_of(path: Path) -> int:
    """Of a part."""
    return int(path.stem.removeprefix("step-"))


def files(folder: Path) -> list[Path]:
    """A run's parts, oldest rows first."""
    return sorted((folder / PARTS).glob("step-*.parquet"), key=step_of)


def reward_columns(frame: pl.DataFrame) -> dict[str, str]:
    """Name of each reward function, by its column."""
    return {c: c.removeprefix(REWARD) for c in frame.columns if c.startswith(REWARD)}


class DamagedError(ValueError):
    """A part cannot be read; the message names it."""


def query(
    folder: Path, ask: Callable[[pl.LazyFrame], pl.LazyFrame], say: Say | None = None
) -> pl.DataFrame:
    """What ``ask`` makes of all rows on disk, of a run that may be going on.

    Args:
        folder: the run's.
        ask: its table has all of ``REQUIRED`` and ``TEXTS``.
        say: told of each damaged part, whose rows are left out; None raises ``DamagedError``.
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
    """All rows that are on disk. Raises ``DamagedError``."""
    return query(folder, lambda table: table)


def _table(paths: Sequence[Path]) -> pl.LazyFrame:
    """The rows of some parts; columns that a part lacks are null in its rows."""
    known = REQUIRED | TEXTS
    if not paths:
        return pl.LazyFrame(schema=known)
    schemas = [pl.read_parquet_schema(path) for path in paths]
    if any(schema.get(name) != kind for schema in schemas for name, kind in REQUIRED.items()):
        raise pl.exceptions.SchemaError("a part lacks columns")
    merged = {name: kind for schema in (*schemas, known) for name, kind in schema.items()}
    return pl.scan_parquet([*paths], schema=merged, missing_columns="insert")


def _whole(path: Path, say: Say | None) -> bool:
    """Whether a part is there, and can be read to its end."""
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
