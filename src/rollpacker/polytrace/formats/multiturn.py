"""``multiturn_workload_step_N.jsonl``: one response a line, with its turns and tool calls.

Format of the PolyTrace suite (arXiv 2509.25279).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rollpacker.polytrace.formats.columns import join, pack, samples, split, unpack
from rollpacker.polytrace.formats.lines import (
    MOST,
    FieldError,
    Record,
    count_of,
    flag,
    integer,
    items,
    number,
    optional,
    records,
    text,
)
from rollpacker.polytrace.formats.reading import Reading
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


def check(record: Record) -> None:
    """Raise ``FieldError`` unless the record has this format."""
    for key in ("step", "prompt_len"):
        integer(record, key)
    for key in ("max_response_len", "max_model_len", "prompt_group_id", "sample_id"):
        optional(record, key, integer)
    for place, turn in enumerate(items(record, "turns")):
        _within(f"turns[{place}]", turn, _check_turn)
    if sum(turn["completion_tokens"] for turn in record["turns"]) > MOST:
        raise FieldError(f"turns: completion_tokens add up to more than {MOST}")
    for place, call in enumerate(items(record, "tool_calls")):
        _within(f"tool_calls[{place}]", call, _check_tool)
    count_of(record, "turn_count", "turns")
    count_of(record, "tool_call_count", "tool_calls")
    optional(record, "finish_reason", text)
    flag(record, "validate")


def _within(place: str, value: object, check_entry: Any) -> None:
    if not isinstance(value, dict):
        raise FieldError(f"{place}: expected a JSON object")
    try:
        check_entry(cast(Record, value))
    except FieldError as error:
        raise FieldError(f"{place}.{error}") from error


def _check_turn(turn: Record) -> None:
    integer(turn, "completion_tokens")
    for key in ("prompt_tokens", "cached_tokens"):
        optional(turn, key, integer)
    optional(turn, "finish_reason", text)
    optional(turn, "engine_latency_s", number)


def _check_tool(call: Record) -> None:
    text(call, "tool_name")
    for key in ("turn", "response_token_len"):
        optional(call, key, integer)
    optional(call, "latency_s", number)
    optional(call, "status", text)


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a line. Raises ``TraceError``.

    ``response_tokens`` adds up ``completion_tokens``; tools' tokens are not in it. ``cap`` is
    what ``max_model_len`` leaves: ``max_response_len`` holds for one turn.
    """
    rows: list[dict[str, Any]] = []
    alone = 0
    for path in files:
        given = [record for _, record in records(path, check)]
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
        "turns": [{"turn": at} for at in range(1 if turns is None else len(turns))],
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
