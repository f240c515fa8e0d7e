"""``multiturn_workload_step_N.jsonl``: one response a line, with its turns and tool calls.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field, StrictBool, model_validator

from rollpacker.polytrace.formats.files.columns import join, pack, samples, split, unpack
from rollpacker.polytrace.formats.files.lines import (
    MOST,
    Count,
    Number,
    Record,
    Text,
    records,
    same_count,
)
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.schema import Trace

NAME = "multiturn"
_TURN = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "completion_tokens",
    "finish_reason": "finish_reason",
    "engine_latency_s": "latency_s",
}
_TOOL = {
    "turn": "turn",
    "tool_name": "name",
    "latency_s": "latency_s",
    "response_token_len": "tokens",
    "status": "status",
}
_COLUMNS = {"step": "step", "prompt_len": "prompt_tokens"}


class MultiturnRequest(BaseModel):
    """One request to the engine."""

    completion_tokens: Count
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    finish_reason: Text | None = None
    engine_latency_s: Number | None = None


class ToolCall(BaseModel):
    """What a turn asked of a tool."""

    tool_name: Text
    turn: Count | None = None
    response_token_len: Count | None = None
    latency_s: Number | None = None
    status: Text | None = None


class MultiturnLine(BaseModel):
    """One response."""

    step: Count
    prompt_len: Count
    max_response_len: Count | None = None
    max_model_len: Count | None = None
    prompt_group_id: Count | None = None
    sample_id: Count | None = None
    turns: list[MultiturnRequest]
    tool_calls: list[ToolCall]
    turn_count: Count | None = None
    tool_call_count: Count | None = None
    finish_reason: Text | None = None
    is_validation: StrictBool = Field(False, alias="validate")

    @model_validator(mode="after")
    def _whole(self) -> MultiturnLine:
        if sum(turn.completion_tokens for turn in self.turns) > MOST:
            raise ValueError(f"turns: completion_tokens add up to more than {MOST}")
        same_count("turn_count", self.turn_count, "turns", self.turns)
        same_count("tool_call_count", self.tool_call_count, "tool_calls", self.tool_calls)
        return self


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a line. Raises ``TraceError``.

    ``response_tokens`` adds up ``completion_tokens``; tools' tokens are not in it. ``cap`` is
    what ``max_model_len`` leaves: ``max_response_len`` holds for one turn.
    """
    rows: list[dict[str, Any]] = []
    alone = 0
    for path in files:
        given = [record for _, record in records(path, MultiturnLine)]
        unnamed = sum(not _ids(record) for record in given)
        if not unnamed:
            given = reading.repeats.fresh(path, reading.task, given, reading.note)
        alone += unnamed
        rows += [_row(record, reading.task, len(rows) + at) for at, record in enumerate(given)]
    if alone:
        reading.note(
            f"{reading.task}: {alone} lines without prompt_group_id and sample_id: each counts "
            "as a prompt of its own"
        )
    return Trace(samples=samples(rows))


def _ids(record: Record) -> bool:
    return record.get("prompt_group_id") is not None and record.get("sample_id") is not None


def _row(record: Record, task: str, at: int) -> dict[str, Any]:
    held, rest = split(record, _COLUMNS)
    turns = [split(turn, _TURN) for turn in rest.pop("turns")]
    calls = [split(call, _TOOL) for call in rest.pop("tool_calls")]
    rest["turns"] = [left for _, left in turns]
    rest["tool_calls"] = [left for _, left in calls]
    named = _ids(record)
    whole, reason = record.get("max_model_len"), record.get("finish_reason")
    return {
        **held,
        "task": task,
        "prompt": f"{record['step']}/{record['prompt_group_id'] if named else f'line-{at}'}",
        "index": record["sample_id"] if named else 0,
        "domain": "validation" if record.get("validate") else None,
        "response_tokens": sum(turn["completion_tokens"] for turn in record["turns"]),
        "cap": None if whole is None else max(0, whole - record["prompt_len"]),
        "truncated": None if reason is None else reason == "length",
        "state": "kept",
        "turns": [kept for kept, _ in turns],
        "tools": [kept for kept, _ in calls],
        "extra": pack(NAME, rest),
    }


def lines(trace: Trace) -> dict[int, list[Record]]:
    """The lines of each step's file."""
    found: dict[int, list[Record]] = {}
    groups: dict[tuple[int, str], int] = {}
    counts: dict[int, int] = {}
    for row in trace.samples.iter_rows(named=True):
        step, key = row["step"], (row["step"], row["prompt"])
        if key not in groups:
            groups[key] = counts.get(step, 0)
            counts[step] = groups[key] + 1
        found.setdefault(step, []).append(_line(row, groups[key]))
    return found


def _line(row: dict[str, Any], group: int) -> Record:
    rest = unpack(row["extra"], NAME)
    if rest is None:
        rest = _new(row, group)
    lefts = (rest.pop("turns", []), rest.pop("tool_calls", []))
    turns = row["turns"] if row["turns"] is not None else [_single(row)]
    return {
        **join(row, _COLUMNS, {"prompt_len": 0} | rest),
        "turns": _entries(turns, _TURN, lefts[0]),
        "tool_calls": _entries(row["tools"] or [], _TOOL, lefts[1]),
    }


def _entries(held: list[Record], keys: dict[str, str], lefts: list[Record]) -> list[Record]:
    padded = [*lefts, *({} for _ in range(len(held) - len(lefts)))]
    return [join(one, keys, left) for one, left in zip(held, padded, strict=False)]


def _new(row: dict[str, Any], group: int) -> Record:
    turns, calls = row["turns"], cast(list[Record], row["tools"] or [])
    cap, start = row["cap"], row["prompt_tokens"] or 0
    return {
        "prompt_group_id": group,
        "sample_id": row["index"],
        "validate": row["domain"] == "validation",
        "turn_count": 1 if turns is None else len(turns),
        "tool_call_count": len(calls),
        **({} if cap is None else {"max_model_len": start + cap}),
        **_reason(row),
        **_totals(row),
        "turns": [{"turn": at} for at in range(1 if turns is None else len(turns))],
    }


def _totals(row: Record) -> Record:
    """Lengths behind the prompt, and which of these tokens were generated (1), run by run; nothing
    where the trace does not tell what came between turns."""
    turns: list[Record] = row["turns"] or []
    starts = [turn["prompt_tokens"] for turn in turns]
    if not turns or None in starts:
        return {}
    runs: list[list[int]] = []
    ends = [start + turn["completion_tokens"] for start, turn in zip(starts, turns, strict=True)]
    for start, end, after in zip(starts, ends, [*starts[1:], ends[-1]], strict=True):
        runs += [[1, end - start], [0, max(0, after - end)]]
    behind = sum(count for _, count in runs)
    return {
        "final_total_len": starts[0] + behind,
        "final_response_len": behind,
        "final_response_loss_len": row["response_tokens"],
        "response_loss_mask_rle": [run for run in runs if run[1]],
    }


def _reason(row: dict[str, Any]) -> Record:
    truncated = row["truncated"]
    return {} if truncated is None else {"finish_reason": "length" if truncated else "stop"}


def _single(row: dict[str, Any]) -> Record:
    return {
        "prompt_tokens": row["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": row["response_tokens"],
        **_reason(row),
    }
