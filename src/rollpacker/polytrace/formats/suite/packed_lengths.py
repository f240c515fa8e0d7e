"""``packed_lengths_step_N.jsonl``: one prompt a line with the lengths of its responses.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import polars as pl
from pydantic import BaseModel, Field, StrictBool, model_validator

from rollpacker.polytrace.formats.files.columns import pack, samples, unpack
from rollpacker.polytrace.formats.files.lines import Count, Record, records
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.schema import Trace

NAME = "packed_lengths"
_COLUMNS = ("step", "dp_rank", "input", "output", "n_sampling")
_LEAST_AT_CAP = 3
_LEAST_CAP = 256
_LEAST_DISTINCT = 8


class PackedLengthsLine(BaseModel):
    """One prompt."""

    step: Count
    rank: Count
    dp_rank: Count
    local_index: Count
    input: Count
    tp_rank: Count | None = None
    is_validation: StrictBool = Field(False, alias="validate")
    output: list[Count]
    n_sampling: Annotated[Count, Field(ge=1)]

    @model_validator(mode="after")
    def _whole(self) -> PackedLengthsLine:
        if self.n_sampling != len(self.output):
            raise ValueError(
                f"output: {len(self.output)} lengths, but n_sampling is {self.n_sampling}"
            )
        return self


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a response, in the order of the lines. Raises ``TraceError``.

    The format has no prompt ids: they are ``step/rank/local_index``, of the first step that had
    the same prompt lengths at the same places. The cap is the longest length, where several
    responses have exactly that.
    """
    found: list[Record] = []
    for path in files:
        given = [record for _, record in records(path, PackedLengthsLine)]
        found += reading.repeats.fresh(path, reading.task, given, reading.note)
    cap = _cap(found, reading)
    if validating := sum(record.get("validate", False) for record in found):
        reading.note(f"{reading.task}: {validating} prompts of validation, domain 'validation'")
    first = _first_steps(found, reading)
    ids: set[tuple[int, str]] = set()
    rows: list[dict[str, Any]] = []
    for record in found:
        name = f"{first[record['step']]}/{record['rank']}/{record['local_index']}"
        rows += _rows(record, reading.task, _unused(ids, record["step"], name), cap)
    return Trace(samples=samples(rows))


def _unused(ids: set[tuple[int, str]], step: int, name: str) -> str:
    """``name``, numbered where another prompt of the step has it already."""
    number, unused = 1, name
    while (step, unused) in ids:
        number += 1
        unused = f"{name}~{number}"
    ids.add((step, unused))
    return unused


def _rows(record: Record, task: str, prompt: str, cap: int | None) -> list[dict[str, Any]]:
    rest = {key: value for key, value in record.items() if key not in _COLUMNS}
    shared = {
        "task": task,
        "step": record["step"],
        "prompt": prompt,
        "domain": "validation" if record.get("validate") else None,
        "prompt_tokens": record["input"],
        "cap": cap,
        "state": "kept",
        "dp_rank": record["dp_rank"],
        "extra": pack(NAME, rest),
    }
    return [
        {
            **shared,
            "index": index,
            "response_tokens": tokens,
            "truncated": None if cap is None else tokens >= cap,
        }
        for index, tokens in enumerate(record["output"])
    ]


def _cap(found: Sequence[Record], reading: Reading) -> int | None:
    longest = max((max(record["output"]) for record in found), default=0)
    times = sum(record["output"].count(longest) for record in found)
    if times < _LEAST_AT_CAP or longest < _LEAST_CAP:
        return None
    reading.note(
        f"{reading.task}: the cap is not in the trace; taken as {longest} tokens, "
        f"which {times} responses have exactly and none exceeds"
    )
    return longest


def _first_steps(found: Sequence[Record], reading: Reading) -> dict[int, int]:
    """For each step the first one with the same prompt lengths at the same places."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for record in found:
        place = (record["rank"], record["local_index"], record["input"])
        places.setdefault(record["step"], []).append(place)
    first: dict[int, int] = {}
    seen: dict[tuple[tuple[int, int, int], ...], int] = {}
    for step, prompts in places.items():
        telling = len({tokens for _, _, tokens in prompts}) >= _LEAST_DISTINCT
        first[step] = seen.setdefault(tuple(sorted(prompts)), step) if telling else step
    if again := [step for step, base in first.items() if base != step]:
        reading.note(
            f"{reading.task}: steps {', '.join(map(str, again))} have the prompt lengths of "
            "earlier steps at the same places: taken as the same prompts"
        )
    return first


def lines(trace: Trace) -> dict[int, list[Record]]:
    """The lines of each step's file."""
    found: dict[int, list[Record]] = {}
    free: dict[tuple[int, int], int] = {}
    groups = trace.samples.group_by("step", "prompt", maintain_order=True).agg(
        pl.all().sort_by("index")
    )
    for row in groups.iter_rows(named=True):
        found.setdefault(row["step"], []).append(_line(row, free))
    return found


def _line(row: dict[str, Any], free: dict[tuple[int, int], int]) -> Record:
    rank = row["dp_rank"][0] or 0
    rest = unpack(row["extra"][0], NAME)
    if rest is None:
        place = free.get((row["step"], rank), 0)
        free[row["step"], rank] = place + 1
        validate = row["domain"][0] == "validation"
        rest = {"rank": rank, "tp_rank": 0, "local_index": place, "validate": validate}
    return {
        "step": row["step"],
        "dp_rank": rank,
        **rest,
        "input": row["prompt_tokens"][0] or 0,
        "output": row["response_tokens"],
        "n_sampling": len(row["response_tokens"]),
    }
