"""The table of responses: one row for each attempt, kept or not, and a part for each step."""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.config import RunConfig
from rollpacker.core import sample_table as table
from rollpacker.core.codec import dumps
from rollpacker.core.types import Group, PromptId
from rollpacker.data.base import Row
from rollpacker.durable import replace_file
from rollpacker.response_text import backend
from rollpacker.reward.base import CodeRun
from rollpacker.reward.functions import reward_names
from rollpacker.runtime.attempts.attempts import EpisodeRecord, Trajectory
from rollpacker.runtime.attempts.rewards import ENVIRONMENT
from rollpacker.runtime.step.step import StepRecord

_ANSWER = 400
"""The most characters of an answer that are kept."""


class Texts:
    """The texts of a step's attempts, decoded as rewards get them (``read``)."""

    def __init__(
        self,
        tokenizer: Any,
        read: Callable[[Sequence[int]], str],
        rows: Mapping[PromptId, Row],
    ) -> None:
        self._decode = backend(tokenizer).decode
        self._response = read
        self._rows = rows
        self._prompts: dict[PromptId, str] = {}

    def begin(self) -> None:
        self._prompts.clear()

    def prompt(self, attempt: Trajectory) -> str:
        """The prompt as the model saw it, with special tokens."""
        if attempt.conversation is not None and attempt.conversation.changed:
            return self._read(attempt)
        text = self._prompts.get(attempt.prompt)
        if text is None:
            text = self._prompts[attempt.prompt] = self._read(attempt)
        return text

    def _read(self, attempt: Trajectory) -> str:
        return self._decode(attempt.prompt_tokens.tolist(), skip_special_tokens=False)

    def completion(self, attempt: Trajectory) -> str | None:
        """The response as the rewards got it. None if there is no output."""
        if attempt.output is None:
            return None
        return self._response(attempt.output.tokens.tolist())

    def answer(self, attempt: Trajectory) -> str | None:
        """The problem's reference answer, or the start of a long one, such as a program's tests."""
        row = self._rows.get(attempt.prompt)
        if row is None or row.answer is None:
            return None
        text = row.answer if isinstance(row.answer, str) else _begun(row.answer)
        return text if len(text) <= _ANSWER else f"{text[:_ANSWER]} ..."


def _begun(value: Any) -> str:
    """The start of a value as JSON: tests may be many megabytes."""
    text = ""
    encoder = json.JSONEncoder(ensure_ascii=False, default=str, skipkeys=True)
    for piece in encoder.iterencode(value):
        text += piece
        if len(text) > _ANSWER:
            break
    return text


_GB = 1e9
_TRUNCATED: dict[str | None, bool] = {"stop": False, "length": True}


class SampleLog:
    """Writes the rows of a run.

    Args:
        config: its ``samples`` chooses the columns besides numbers.
        last_step: rows of later steps, left by a crash, are dropped. -1 drops all.
        say: gets a line if rows cannot be written (they are tried again later), and when the table
            reaches its size limit.
    """

    def __init__(
        self, folder: Path, config: RunConfig, *, last_step: int, texts: Texts, say: table.Say
    ) -> None:
        self._folder, self._say, self._texts, self._kept = folder, say, texts, config.samples
        self._limit = int(config.samples.max_gb * _GB)
        self._emulated = config.devices.emulate is not None
        acts = config.environment is not None
        self._programs = any(reward.runs_programs for reward in config.rewards)
        self._rewards = [*reward_names(config.rewards), *([ENVIRONMENT] * acts)]
        self._turns = acts
        self._schema = (
            table.REQUIRED
            | {table.REWARD + name: pl.Float32() for name in self._rewards}
            | (table.TEXTS if self._kept.texts else {})
            | (table.TOKEN_IDS if self._kept.token_ids else {})
            | (table.PROGRAM if self._programs else {})
            | (table.TURNS if self._turns else {})
        )
        self._unwritten: deque[tuple[Path, bytes]] = deque()
        """Encoded parts that the disk had no room for."""
        self._failing = self._forgot = False
        for path in table.files(folder):
            if table.step_of(path) > last_step:
                path.unlink()
        self._sizes = {path: path.stat().st_size for path in table.files(folder)}

    def add(self, record: StepRecord, groups: Sequence[Group]) -> None:
        """Write the rows of an ended step, after earlier ones that did not fit."""
        part = table.part(self._folder, record.step)
        if record.attempts:
            columns = self._numbers(record, groups) | self._rest([*record.attempts.values()])
            self._unwritten.append((part, _encoded(columns, self._schema)))
        self.flush()

    def flush(self) -> None:
        while self._unwritten:
            part, data = self._unwritten[0]
            try:
                part.parent.mkdir(exist_ok=True)
                replace_file(part, data)
            except OSError as error:
                if not self._failing:
                    self._say(f"{part}: cannot be written ({error}), rows are kept in memory")
                self._failing = True
                return
            self._failing = False
            self._unwritten.popleft()
            self._sizes[part] = len(data)
            self._keep_small()

    def _keep_small(self) -> None:
        """Delete the oldest parts beyond the limit. The newest stays, however large it is."""
        while self._limit and len(self._sizes) > 1 and sum(self._sizes.values()) > self._limit:
            if not self._forgot:
                self._say(
                    f"{self._folder}: the table of responses has reached samples.max_gb="
                    f"{self._kept.max_gb:g}: the oldest steps' rows are deleted"
                )
            self._forgot = True
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            oldest.unlink(missing_ok=True)

    def _numbers(self, record: StepRecord, groups: Sequence[Group]) -> dict[str, list[Any]]:
        attempts, learned = [*record.attempts.values()], not self._emulated
        advantages = {
            sample.attempt: float(advantage)
            for group in groups
            if learned
            for sample, advantage in zip(group.samples, group.advantages, strict=True)
        }
        ends = [record.end_s if a.end_s is None else a.end_s for a in attempts]
        reasons = [None if a.output is None else a.output.finish_reason for a in attempts]
        return {
            "prompt": [a.prompt for a in attempts],
            "attempt": [a.id for a in attempts],
            "sample_index": [a.index for a in attempts],
            "step": [record.step] * len(attempts),
            "round_kind": [record.kind] * len(attempts),
            "worker": [a.engine for a in attempts],
            "weights_version": [a.oldest(record.step) for a in attempts],
            "prompt_tokens": [len(a.prompt_tokens) for a in attempts],
            "tokens": [a.tokens for a in attempts],
            "reward": [a.reward if learned else None for a in attempts],
            "finish_reason": reasons,
            "state": [a.verdict for a in attempts],
            "start_s": [a.start_s for a in attempts],
            "end_s": ends,
            "grade_s": [
                None if a.graded_s is None else a.graded_s - end
                for a, end in zip(attempts, ends, strict=True)
            ],
            "truncated": [_TRUNCATED.get(reason) for reason in reasons],
            "advantage": [advantages.get(a.id) for a in attempts],
            "stale_tokens": [a.stale for a in attempts],
        } | {
            table.REWARD + name: [a.rewards.get(name) if learned else None for a in attempts]
            for name in self._rewards
        }

    def _rest(self, attempts: Sequence[Trajectory]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        if self._kept.texts:
            self._texts.begin()
            columns["prompt_text"] = [self._texts.prompt(a) for a in attempts]
            columns["completion"] = [self._texts.completion(a) for a in attempts]
            columns["answer"] = [self._texts.answer(a) for a in attempts]
        if self._kept.token_ids:
            ids = [None if a.output is None else pl.Series(a.output.tokens) for a in attempts]
            columns["completion_ids"] = ids
        if self._programs:
            programs = [_program(next(iter(a.runs.values()), None)) for a in attempts]
            columns |= {n: [p[i] for p in programs] for i, n in enumerate(table.PROGRAM)}
        if self._turns:
            turns = [_turns(a.conversation, self._kept.texts) for a in attempts]
            columns |= {n: [t[i] for t in turns] for i, n in enumerate(table.TURNS)}
        for name in sorted({name for a in attempts for name in a.extra}):
            columns[table.EXTRA + name] = [a.extra.get(name) for a in attempts]
        return columns


def _encoded(columns: Mapping[str, Sequence[Any]], schema: Mapping[str, pl.DataType]) -> bytes:
    kinds = {name: schema.get(name, pl.String()) for name in columns}
    try:
        frame = pl.DataFrame(columns, schema=kinds)
    except UnicodeEncodeError:  # half of a surrogate pair in JSON
        encodable = {
            name: [v.encode(errors="replace").decode() if isinstance(v, str) else v for v in values]
            for name, values in columns.items()
        }
        frame = pl.DataFrame(encodable, schema=kinds)
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _program(run: CodeRun | None) -> tuple[object, ...]:
    if run is None:
        return (None,) * len(table.PROGRAM)
    return run.verdict, list(run.tests), list(run.cpu_s), run.level, run.forgeable


def _turns(conversation: EpisodeRecord | None, texts: bool) -> tuple[object, ...]:
    if conversation is None:
        return (None,) * len(table.TURNS)
    turns = conversation.turns
    return (
        [turn.sampled for turn in turns],
        [turn.added for turn in turns],
        [turn.wait_s for turn in turns],
        conversation.calls,
        conversation.failed_calls,
        dumps(conversation.messages).decode() if texts and conversation.messages else None,
    )
