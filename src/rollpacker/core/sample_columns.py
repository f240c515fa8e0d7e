"""``samples.parquet``, a run's table of responses: its columns, and which files it is made of."""

from __future__ import annotations

from pathlib import Path

import polars as pl

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
"""Columns that every table has, and without which a file is damaged; times are seconds since the
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

FINAL = "samples.parquet"
PARTS = "samples"


def files(folder: Path) -> list[Path]:
    """The table's files, oldest rows first."""
    final = [folder / FINAL] if (folder / FINAL).exists() else []
    return final + sorted((folder / PARTS).glob("part-*.parquet"))


def reward_columns(frame: pl.DataFrame) -> dict[str, str]:
    """Name of each reward function, by its column."""
    return {c: c.removeprefix(REWARD) for c in frame.columns if c.startswith(REWARD)}
