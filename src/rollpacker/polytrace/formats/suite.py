"""Read and write the files of the published PolyTrace suite (arXiv 2509.25279).

They hold a prompt's lengths, turns and tool calls, seconds of rewards, and filters of dynamic
sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import polars as pl
from pydantic import BaseModel, Field, StrictBool, model_validator

from rollpacker.polytrace.formats.files import (
    MOST,
    Count,
    Note,
    Number,
    Reading,
    Record,
    Text,
    join,
    pack,
    records,
    same_count,
    samples,
    silent,
    split,
    table,
    unpack,
)
from rollpacker.polytrace.formats.ours import native
from rollpacker.polytrace.schema import FILTERS, REWARD_BATCHES, SAMPLES, Trace, TraceError

_PACKED, _MULTITURN = "packed_lengths", "multiturn"
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


class MultiturnRequest(BaseModel):
    """One request to the engine."""

    completion_tokens: Count
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    finish_reason: Text | None = None
    engine_latency_s: Number | None = None


class ToolCall(BaseModel):
    """A turn's tool call."""

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


LineAt = tuple[Path, int, Record]
Given = list[tuple[Path, list[Record]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteFormat:
    """One of the suite's formats.

    Args:
        file: start of its files' names.
        columns: the columns of its keys. Other keys are kept in ``extra``.
        no_place: columns that it cannot hold.
    """

    file: str
    model: type[BaseModel]
    columns: dict[str, str]
    read: Callable[[Given, Reading], Trace]
    lines: Callable[[Trace], dict[str, list[Record]]]
    no_place: tuple[str, ...] = ()


def read(files: Sequence[Path], reading: Reading, kind: str) -> Trace:
    """Read the files of one format. Raises ``TraceError``."""
    given = [(path, [line for *_, line in good_lines([path], kind, reading)]) for path in files]
    return SUITE[kind].read(given, reading)


def good_lines(files: Sequence[Path], kind: str, reading: Reading) -> Iterator[LineAt]:
    """Yield lines in the expected format. ``reading`` gets the others."""
    for path in files:
        for number, line in records(path, SUITE[kind].model, reading.bad):
            yield path, number, line


def _fresh(given: Given, reading: Reading, **options: Any) -> list[Record]:
    repeats = reading.repeats
    return [
        line
        for path, lines in given
        for line in repeats.fresh(path, reading.task, lines, reading.note, **options)
    ]


def _domain(record: Record) -> str | None:
    return "validation" if record.get("validate") else None


# packed_lengths_step_N.jsonl: one prompt a line with the lengths of its responses.


def _read_packed(given: Given, reading: Reading) -> Trace:
    """Return one row per response, in the order of the lines.

    The format has no prompt ids: they are ``step/rank/local_index``, of the first step with the
    same prompt lengths at the same places. The cap is the longest length, if several responses have
    it.
    """
    found = _fresh(given, reading)
    cap = _cap(found, reading)
    if validating := sum(record.get("validate", False) for record in found):
        reading.note(f"{reading.task}: {validating} prompts of validation, domain 'validation'")
    first = _first_steps(found, reading)
    ids: set[tuple[int, str]] = set()
    rows: list[Record] = []
    for record in found:
        name = f"{first[record['step']]}/{record['rank']}/{record['local_index']}"
        prompt = _unused(ids, record["step"], name)
        rows += _packed_rows(record, cap, {"task": reading.task, "prompt": prompt})
    return Trace(samples=samples(rows))


def _unused(ids: set[tuple[int, str]], step: int, name: str) -> str:
    number, unused = 1, name
    while (step, unused) in ids:
        number += 1
        unused = f"{name}~{number}"
    ids.add((step, unused))
    return unused


def _packed_rows(record: Record, cap: int | None, shared: Record) -> Iterable[Record]:
    held, rest = split(record, SUITE[_PACKED].columns)
    rest = {key: value for key, value in rest.items() if key not in ("output", "n_sampling")}
    shared = {
        **shared,
        **held,
        "domain": _domain(record),
        "cap": cap,
        "state": "kept",
        "extra": pack(_PACKED, rest),
    }
    for index, tokens in enumerate(record["output"]):
        truncated = None if cap is None else tokens >= cap
        yield {**shared, "index": index, "response_tokens": tokens, "truncated": truncated}


def _cap(found: Sequence[Record], reading: Reading) -> int | None:
    longest = max((max(record["output"]) for record in found), default=0)
    times = sum(record["output"].count(longest) for record in found)
    if times < _LEAST_AT_CAP or longest < _LEAST_CAP:
        return None
    reading.note(
        f"{reading.task}: the cap is not in the trace. It is taken as {longest} "
        f"tokens, which {times} responses have exactly and none exceeds"
    )
    return longest


def _first_steps(found: Sequence[Record], reading: Reading) -> dict[int, int]:
    """Map each step to the first one with the same prompt lengths at the same places."""
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


def _packed_lines(trace: Trace) -> Iterable[Record]:
    free: dict[tuple[int, int], int] = {}
    groups = trace.samples.group_by("step", "prompt", maintain_order=True).agg(
        pl.all().sort_by("index")
    )
    for row in groups.iter_rows(named=True):
        rank = row["dp_rank"][0] or 0
        rest = unpack(row["extra"][0], _PACKED)
        if rest is None:
            place = free.get((row["step"], rank), 0)
            free[row["step"], rank] = place + 1
            validate = row["domain"][0] == "validation"
            rest = {"rank": rank, "tp_rank": 0, "local_index": place, "validate": validate}
        yield {
            "step": row["step"],
            "dp_rank": rank,
            **rest,
            "input": row["prompt_tokens"][0] or 0,
            "output": row["response_tokens"],
            "n_sampling": len(row["response_tokens"]),
        }


# multiturn_workload_step_N.jsonl: one response a line, with its turns and tool calls.


def _read_multiturn(given: Given, reading: Reading) -> Trace:
    """Return one row per line. ``response_tokens`` adds up ``completion_tokens``, without tools'
    tokens. ``cap`` is ``max_model_len`` less the prompt, because ``max_response_len`` limits one
    turn."""
    rows: list[Record] = []
    alone = 0
    for path, lines in given:
        unnamed = sum(not _has_ids(record) for record in lines)
        alone += unnamed
        kept = lines if unnamed else _fresh([(path, lines)], reading)
        rows += [_multiturn_row(each, reading.task, len(rows) + at) for at, each in enumerate(kept)]
    if alone:
        reading.note(
            f"{reading.task}: {alone} lines without prompt_group_id and sample_id: each counts "
            "as a prompt of its own"
        )
    return Trace(samples=samples(rows))


def _has_ids(record: Record) -> bool:
    return record.get("prompt_group_id") is not None and record.get("sample_id") is not None


def _multiturn_row(record: Record, task: str, at: int) -> Record:
    held, rest = split(record, SUITE[_MULTITURN].columns)
    turns = [split(turn, _TURN) for turn in rest["turns"]]
    calls = [split(call, _TOOL) for call in rest["tool_calls"]]
    rest["turns"] = [left for _, left in turns]
    rest["tool_calls"] = [left for _, left in calls]
    named = _has_ids(record)
    whole, reason = record.get("max_model_len"), record.get("finish_reason")
    return {
        **held,
        "task": task,
        "prompt": f"{record['step']}/{record['prompt_group_id'] if named else f'line-{at}'}",
        "index": record["sample_id"] if named else 0,
        "domain": _domain(record),
        "response_tokens": sum(turn["completion_tokens"] for turn in record["turns"]),
        "cap": None if whole is None else max(0, whole - record["prompt_len"]),
        "truncated": None if reason is None else reason == "length",
        "state": "kept",
        "turns": [kept for kept, _ in turns],
        "tools": [kept for kept, _ in calls],
        "extra": pack(_MULTITURN, rest),
    }


def _multiturn_lines(trace: Trace) -> Iterable[Record]:
    groups: dict[int, dict[str, int]] = {}
    for row in trace.samples.iter_rows(named=True):
        of_step = groups.setdefault(row["step"], {})
        group = of_step.setdefault(row["prompt"], len(of_step))
        rest = unpack(row["extra"], _MULTITURN)
        if rest is None:
            rest = _new(row, group)
        lefts = (rest.pop("turns", []), rest.pop("tool_calls", []))
        turns = row["turns"] if row["turns"] is not None else [_single(row)]
        yield {
            **join(row, SUITE[_MULTITURN].columns, {"prompt_len": 0} | rest),
            "turns": _entries(turns, _TURN, lefts[0]),
            "tool_calls": _entries(row["tools"] or [], _TOOL, lefts[1]),
        }


def _entries(held: list[Record], keys: dict[str, str], lefts: list[Record]) -> list[Record]:
    padded = [*lefts, *({} for _ in range(len(held) - len(lefts)))]
    return [join(one, keys, left) for one, left in zip(held, padded, strict=False)]


def _new(row: Record, group: int) -> Record:
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
    """Lengths after the prompt, and runs of generated (1) and other (0) tokens. Empty if the
    trace does not record the tokens between turns."""
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


def _reason(row: Record) -> Record:
    truncated = row["truncated"]
    return {} if truncated is None else {"finish_reason": "length" if truncated else "stop"}


def _single(row: Record) -> Record:
    return {
        "prompt_tokens": row["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": row["response_tokens"],
        **_reason(row),
    }


# reward_timings_step_N.jsonl: how long each rank spent on the rewards of a step.
# dapo_filter_indices.jsonl: which prompts of a generation batch dynamic sampling kept.


def _row(record: Record, task: str, kind: str) -> Record:
    held, rest = split(record, SUITE[kind].columns)
    return {**held, "task": task, "extra": json.dumps(rest)}


def _read_timings(given: Given, reading: Reading) -> Trace:
    fresh = _fresh(given, reading, least=1)
    rows = [_row(record, reading.task, "reward_timings") for record in fresh]
    return Trace(samples=samples([]), reward_batches=table(rows, REWARD_BATCHES))


def _timing_lines(trace: Trace) -> Iterable[Record]:
    for row in trace.reward_batches.iter_rows(named=True):
        rest = json.loads(row["extra"]) if row["extra"] else {"rank": row["dp_rank"] or 0}
        yield join(row, SUITE["reward_timings"].columns, rest)


def _read_filters(given: Given, reading: Reading) -> Trace:
    rows = [_row(line, reading.task, "dapo_filter") for _, lines in given for line in lines]
    return Trace(samples=samples([]), filters=table(rows, FILTERS))


def _filter_lines(trace: Trace) -> dict[str, list[Record]]:
    found: list[Record] = []
    for row in trace.filters.iter_rows(named=True):
        rest: Record = json.loads(row["extra"]) if row["extra"] else {}
        if "prompt_count" not in rest:
            rest["prompt_count"] = len(_in_batch_order(trace.samples, row["task"], row["step"]))
        found.append(join(row, SUITE["dapo_filter"].columns, rest))
    return {"dapo_filter_indices.jsonl": found} if found else {}


def mark_filtered(trace: Trace, note: Note) -> Trace:
    """Set the state ``filtered`` on prompts that dynamic sampling dropped. An index counts the
    prompts of a generation batch over ranks, and within a rank by ``local_index``. The lines of
    a file come in the order in which ranks finished writing."""
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
        rest = unpack(extra, _PACKED) or {}
        places.append((rank or 0, rest.get("local_index", at), name))
    return [name for _, _, name in sorted(places)]


def _by_step(
    file: str, lines: Callable[[Trace], Iterable[Record]]
) -> Callable[[Trace], dict[str, list[Record]]]:
    def files(trace: Trace) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for line in lines(trace):
            found.setdefault(f"{file}_step_{line['step']}.jsonl", []).append(line)
        return found

    return files


SUITE: Mapping[str, SuiteFormat] = {
    _PACKED: SuiteFormat(
        file="packed_lengths",
        model=PackedLengthsLine,
        columns={"step": "step", "dp_rank": "dp_rank", "input": "prompt_tokens"},
        read=_read_packed,
        lines=_by_step("packed_lengths", _packed_lines),
        no_place=("turns", "tools", "reward", "reward_s", "start_s", "end_s"),
    ),
    _MULTITURN: SuiteFormat(
        file="multiturn_workload",
        model=MultiturnLine,
        columns={"step": "step", "prompt_len": "prompt_tokens"},
        read=_read_multiturn,
        lines=_by_step("multiturn_workload", _multiturn_lines),
        no_place=("dp_rank", "reward", "reward_s", "start_s", "end_s"),
    ),
    "reward_timings": SuiteFormat(
        file="reward_timings",
        model=RewardTimingsLine,
        columns={name: name for name in ("step", "dp_rank", "batch_size", "reward_time_s")},
        read=_read_timings,
        lines=_by_step("reward_timings", _timing_lines),
    ),
    "dapo_filter": SuiteFormat(
        file="dapo_filter",
        model=DapoFilterLine,
        columns={
            "workload_step": "step",
            "kept_prompt_indices": "kept_prompt_indices",
            "used_prompt_indices": "used_prompt_indices",
        },
        read=_read_filters,
        lines=_filter_lines,
    ),
}


# --- Writing a trace: the suite's files, or the native one

WRITABLE = ("native", "polytrace", *SUITE)
"""Formats that ``write`` knows. ``polytrace`` writes each file that the trace has rows for."""


def write(trace: Trace, path: Path, format: str, *, note: Note = silent) -> list[Path]:
    """Write ``trace`` and return the files.

    Args:
        path: the file of a native trace. Otherwise a folder, made if missing, which gets one file
            per step (``packed_lengths_step_N.jsonl``), and one subfolder per task if there are
            several.
        format: one of ``WRITABLE``.
        note: gets one line each about values that the format cannot hold.

    Raises ``TraceError`` for an unknown format or an empty result, and ``OSError``.
    """
    if format not in WRITABLE:
        raise TraceError(f"cannot write {format!r}; formats: {', '.join(WRITABLE)}")
    if format == "native":
        if path.suffix != ".parquet":
            raise TraceError(f"{path}: a native trace is a file *.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        native.write(trace, path)
        return [path]
    if path.is_file():
        raise TraceError(f"{path}: expected a folder for the files of {format}")
    tasks = pl.concat([table["task"] for table in trace.tables])
    names: list[str] = tasks.unique(maintain_order=True).to_list()
    written: list[Path] = []
    for name in names:
        folder = path / _safe(name) if len(names) > 1 else path
        files = _files(trace.only(name), format, note)
        if files:
            folder.mkdir(parents=True, exist_ok=True)
        for file, found in files.items():
            text = "".join(json.dumps(record) + "\n" for record in found)
            (folder / file).write_text(text, encoding="utf-8")
            written.append(folder / file)
    if not written:
        raise TraceError(f"{path}: the trace has nothing to write as {format}")
    return written


def _safe(name: str) -> Path:
    """A task's folder. A task may be named by a path, but never by one that leads out."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return Path(*parts) if parts else Path("task")


def _files(trace: Trace, format: str, note: Note) -> dict[str, list[Record]]:
    if format != "polytrace":
        return _lines(trace, format, note)
    turns = trace.samples["turns"].is_not_null()
    files: dict[str, list[Record]] = {}
    for kind, rows in (("packed_lengths", ~turns), ("multiturn", turns)):
        files |= _lines(Trace(samples=trace.samples.filter(rows)), kind, note)
    return files | _lines(trace, "reward_timings", note) | _lines(trace, "dapo_filter", note)


def _lines(trace: Trace, kind: str, note: Note) -> dict[str, list[Record]]:
    frame, form = trace.samples, SUITE[kind]
    if form.no_place and frame.height:
        for line in _losses(frame, kind):
            note(f"{kind} {line}")
    return form.lines(trace)


def _losses(frame: pl.DataFrame, kind: str) -> Iterator[str]:
    lost = [name for name in SUITE[kind].no_place if frame[name].is_not_null().any()]
    if lost:
        yield f"has no place for {', '.join(lost)}: left out"
    if aborted := frame.filter(pl.col("state") == "aborted").height:
        yield f"does not tell aborted responses: {aborted} are written as if complete"
    if frame["prompt_tokens"].is_null().any():
        yield "needs prompt lengths: unknown ones are written as 0"
    foreign = unpack(frame["extra"][0], kind) is None
    if foreign and frame["prompt"].n_unique() < frame.select("step", "prompt").n_unique():
        yield "has no prompt ids: prompts of several steps become different ones"
