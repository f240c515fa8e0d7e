"""One schema for every workload trace: a table of responses, and two small tables of batches.

The native form is one parquet of ``SAMPLES`` whose metadata names ``VERSION`` and holds the two
small tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import polars as pl

VERSION = 1

TURN = pl.Struct(
    {
        "prompt_tokens": pl.Int32(),
        "cached_tokens": pl.Int32(),
        "completion_tokens": pl.Int32(),
        "finish_reason": pl.String(),
        "latency_s": pl.Float64(),
    }
)
TOOL = pl.Struct(
    {
        "turn": pl.Int32(),
        "name": pl.String(),
        "latency_s": pl.Float64(),
        "tokens": pl.Int32(),
        "status": pl.String(),
    }
)
SAMPLES: dict[str, pl.DataType] = {
    "task": pl.String(),
    "step": pl.Int32(),
    "prompt": pl.String(),
    "index": pl.Int32(),
    "domain": pl.String(),
    "prompt_tokens": pl.Int32(),
    "response_tokens": pl.Int32(),
    "cap": pl.Int32(),
    "truncated": pl.Boolean(),
    "state": pl.String(),
    "dp_rank": pl.Int32(),
    "turns": pl.List(TURN),
    "tools": pl.List(TOOL),
    "reward": pl.Float64(),
    "reward_s": pl.Float64(),
    "reward_kind": pl.String(),
    "start_s": pl.Float64(),
    "end_s": pl.Float64(),
    "extra": pl.String(),
}
"""Columns of the table of responses.

``prompt`` is stable within a task (also across epochs, if the source identifies prompts).
``response_tokens`` counts generated tokens, over all turns. ``cap``: longest response that the run
allowed, null if unknown. ``state``: ``kept``, ``filtered`` (dynamic sampling) or ``aborted``
(``response_tokens`` is then a lower bound). ``extra``: JSON of the source's other keys, so that an
export reproduces the source.
"""

REWARD_BATCHES: dict[str, pl.DataType] = {
    "task": pl.String(),
    "step": pl.Int32(),
    "dp_rank": pl.Int32(),
    "batch_size": pl.Int32(),
    "reward_time_s": pl.Float64(),
    "extra": pl.String(),
}
FILTERS: dict[str, pl.DataType] = {
    "task": pl.String(),
    "step": pl.Int32(),
    "kept_prompt_indices": pl.List(pl.Int32()),
    "used_prompt_indices": pl.List(pl.Int32()),
    "extra": pl.String(),
}


def _empty(columns: dict[str, pl.DataType]) -> pl.DataFrame:
    return pl.DataFrame(schema=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload.

    Args:
        samples: one row per response, columns ``SAMPLES``.
        reward_batches: seconds that a rank spent on the rewards of a step.
        filters: prompts of a generation batch that dynamic sampling kept.
    """

    samples: pl.DataFrame
    reward_batches: pl.DataFrame = field(default_factory=lambda: _empty(REWARD_BATCHES))
    filters: pl.DataFrame = field(default_factory=lambda: _empty(FILTERS))

    @property
    def tasks(self) -> list[str]:
        return self.samples["task"].unique(maintain_order=True).to_list()

    @property
    def tables(self) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        return self.samples, self.reward_batches, self.filters

    def only(self, task: str) -> Trace:
        return Trace.of(table.filter(pl.col("task") == task) for table in self.tables)

    def of_training(self) -> Trace:
        """Drop responses of evaluations (domain ``validation``), unless all responses are."""
        rest = self.samples.filter(pl.col("domain").ne_missing("validation"))
        return replace(self, samples=rest) if rest.height else self

    @classmethod
    def of(cls, tables: Iterable[pl.DataFrame]) -> Trace:
        samples, reward_batches, filters = tables
        return cls(samples=samples, reward_batches=reward_batches, filters=filters)


class TraceError(ValueError):
    """A trace cannot be read. The message names the file, the line and the field."""
