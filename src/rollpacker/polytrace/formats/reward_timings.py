"""``reward_timings_step_N.jsonl``: how long each rank spent on the rewards of a step.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats.columns import join, samples, split
from rollpacker.polytrace.formats.lines import Record, flag, integer, number, optional, records
from rollpacker.polytrace.formats.reading import Reading
from rollpacker.polytrace.schema import REWARD_BATCHES, Trace

_COLUMNS = {name: name for name in ("step", "dp_rank", "batch_size", "reward_time_s")}


def check(record: Record) -> None:
    """Raise ``FieldError`` unless the record has this format."""
    for key in ("step", "rank", "dp_rank", "batch_size"):
        integer(record, key)
    number(record, "reward_time_s")
    for key in ("response_sum", "response_mean", "response_max"):
        optional(record, key, number)
    flag(record, "validate")


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row of ``reward_batches`` a line. Raises ``TraceError``."""
    rows: list[Record] = []
    for path in files:
        given = [record for _, record in records(path, check)]
        fresh = reading.repeats.fresh(path, reading.task, given, reading.note, least=1)
        for record in fresh:
            held, rest = split(record, _COLUMNS)
            rows.append({**held, "task": reading.task, "extra": json.dumps(rest)})
    columns = {name: [row[name] for row in rows] for name in REWARD_BATCHES}
    return Trace(samples=samples([]), reward_batches=pl.DataFrame(columns, schema=REWARD_BATCHES))


def lines(trace: Trace) -> dict[int, list[Record]]:
    """The lines of each step's file."""
    found: dict[int, list[Record]] = {}
    for row in trace.reward_batches.iter_rows(named=True):
        rest = json.loads(row["extra"]) if row["extra"] else {"rank": row["dp_rank"] or 0}
        found.setdefault(row["step"], []).append(join(row, _COLUMNS, rest))
    return found
