"""``reward_timings_step_N.jsonl``: how long each rank spent on the rewards of a step.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field, StrictBool

from rollpacker.polytrace.formats.files.columns import join, samples, split, table
from rollpacker.polytrace.formats.files.lines import Count, Number, Record, records
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.schema import REWARD_BATCHES, Trace

_COLUMNS = {name: name for name in ("step", "dp_rank", "batch_size", "reward_time_s")}


class RewardTimingsLine(BaseModel):
    """One rank's rewards of a step."""

    step: Count
    rank: Count
    dp_rank: Count
    batch_size: Count
    reward_time_s: Number
    response_sum: Number | None = None
    response_mean: Number | None = None
    response_max: Number | None = None
    is_validation: StrictBool = Field(False, alias="validate")


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row of ``reward_batches`` a line. Raises ``TraceError``."""
    rows: list[Record] = []
    for path in files:
        given = [record for _, record in records(path, RewardTimingsLine)]
        fresh = reading.repeats.fresh(path, reading.task, given, reading.note, least=1)
        for record in fresh:
            held, rest = split(record, _COLUMNS)
            rows.append({**held, "task": reading.task, "extra": json.dumps(rest)})
    return Trace(samples=samples([]), reward_batches=table(rows, REWARD_BATCHES))


def lines(trace: Trace) -> dict[int, list[Record]]:
    """The lines of each step's file."""
    found: dict[int, list[Record]] = {}
    for row in trace.reward_batches.iter_rows(named=True):
        rest = json.loads(row["extra"]) if row["extra"] else {"rank": row["dp_rank"] or 0}
        found.setdefault(row["step"], []).append(join(row, _COLUMNS, rest))
    return found
