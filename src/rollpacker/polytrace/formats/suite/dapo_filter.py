"""``dapo_filter_indices.jsonl``: which prompts of a generation batch dynamic sampling kept.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
from pydantic import BaseModel, model_validator

from rollpacker.polytrace.formats.files.columns import join, samples, split, table, unpack
from rollpacker.polytrace.formats.files.lines import Count, Note, Record, records, same_count
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.formats.suite import packed_lengths
from rollpacker.polytrace.schema import FILTERS, SAMPLES, Trace

_COLUMNS = {
    "workload_step": "step",
    "kept_prompt_indices": "kept_prompt_indices",
    "used_prompt_indices": "used_prompt_indices",
}


class DapoFilterLine(BaseModel):
    """One generation batch."""

    workload_step: Count
    prompt_count: Count
    trainer_step: Count | None = None
    gen_batch_index: Count | None = None
    n_sampling: Count | None = None
    train_batch_size: Count | None = None
    kept_prompt_indices: list[Count]
    used_prompt_indices: list[Count]
    kept_prompt_count: Count | None = None
    used_prompt_count: Count | None = None

    @model_validator(mode="after")
    def _whole(self) -> DapoFilterLine:
        kept, used = "kept_prompt_indices", "used_prompt_indices"
        for key, places in ((kept, self.kept_prompt_indices), (used, self.used_prompt_indices)):
            if places and max(places) >= self.prompt_count:
                raise ValueError(f"{key}: {max(places)}, but prompt_count is {self.prompt_count}")
            if len(set(places)) < len(places):
                raise ValueError(f"{key}: an index appears twice")
        same_count("kept_prompt_count", self.kept_prompt_count, kept, self.kept_prompt_indices)
        same_count("used_prompt_count", self.used_prompt_count, used, self.used_prompt_indices)
        return self


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row of ``filters`` a line. Raises ``TraceError``."""
    rows: list[Record] = []
    for path in files:
        for _, record in records(path, DapoFilterLine):
            held, rest = split(record, _COLUMNS)
            rows.append({**held, "task": reading.task, "extra": json.dumps(rest)})
    return Trace(samples=samples([]), filters=table(rows, FILTERS))


def mark(trace: Trace, note: Note) -> Trace:
    """``trace`` with the state ``filtered`` on prompts that dynamic sampling dropped.

    An index counts the prompts of a generation batch over ranks, and within a rank by
    ``local_index``; the lines of a file come in the order in which ranks finished writing.
    """
    dropped: list[tuple[str, int, str]] = []
    for row in trace.filters.iter_rows(named=True):
        prompts = _in_batch_order(trace.samples, row["task"], row["step"])
        if not prompts:
            continue
        count = json.loads(row["extra"] or "{}").get("prompt_count", len(prompts))
        if count != len(prompts):
            note(
                f"{row['task']}: filter of step {row['step']} speaks of {count} prompts, the "
                f"trace has {len(prompts)}: not applied"
            )
            continue
        kept = set(row["kept_prompt_indices"])
        dropped += [
            (row["task"], row["step"], name) for i, name in enumerate(prompts) if i not in kept
        ]
    if not dropped:
        return trace
    key = ["task", "step", "prompt"]
    keys = pl.DataFrame(dropped, schema={name: SAMPLES[name] for name in key}, orient="row")
    keys = keys.with_columns(_filtered=pl.lit("filtered"))
    marked = trace.samples.join(keys, on=key, how="left", maintain_order="left")
    marked = marked.with_columns(state=pl.coalesce("_filtered", "state")).drop("_filtered")
    return replace(trace, samples=marked)


def _in_batch_order(frame: pl.DataFrame, task: str, step: int) -> list[str]:
    prompts = frame.filter((pl.col("task") == task) & (pl.col("step") == step)).unique(
        "prompt", keep="first", maintain_order=True
    )
    places: list[tuple[int, int, str]] = []
    for at, (name, rank, extra) in enumerate(
        prompts.select("prompt", "dp_rank", "extra").iter_rows()
    ):
        rest = unpack(extra, packed_lengths.NAME) or {}
        places.append((rank or 0, rest.get("local_index", at), name))
    return [name for _, _, name in sorted(places)]


def lines(trace: Trace) -> list[Record]:
    """The lines of the file."""
    found: list[Record] = []
    for row in trace.filters.iter_rows(named=True):
        rest: Record = json.loads(row["extra"]) if row["extra"] else {}
        if "prompt_count" not in rest:
            rest["prompt_count"] = len(_in_batch_order(trace.samples, row["task"], row["step"]))
        found.append(join(row, _COLUMNS, rest))
    return found
