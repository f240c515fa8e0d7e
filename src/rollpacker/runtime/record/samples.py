"""The table of every rollout: one row per attempt, kept or not, with its text.

Rows are buffered and written as ``samples/part-*.parquet``; the end of a run merges the parts into
``samples.parquet``. A crash loses at most ``_FLUSH_BYTES`` of rows, those of ``flush_s`` seconds.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.config import SamplesConfig
from rollpacker.core import sample_columns
from rollpacker.core.codec import dumps
from rollpacker.core.types import AttemptId, EngineId, FinishReason, PromptId, RoundKind
from rollpacker.durable import replace_file
from rollpacker.reward.base import CodeRun
from rollpacker.runtime.attempts.attempts import State
from rollpacker.runtime.attempts.episode_record import EpisodeRecord
from rollpacker.runtime.record import sample_table as table

_FLUSH_BYTES = 1 << 20
_ROW_BYTES = 200
"""Of a row without its texts, about."""
_GB = 1e9
_TRUNCATED: dict[FinishReason | None, bool] = {"stop": False, "length": True}


@dataclass(slots=True, kw_only=True)
class SampleRow:
    """An attempt; the fields are columns of the table, ``rewards`` one for each function."""

    prompt: PromptId
    attempt: AttemptId
    sample_index: int
    step: int
    round_kind: RoundKind
    worker: EngineId
    weights_version: int
    prompt_tokens: int
    tokens: int
    finish_reason: FinishReason | None
    state: State
    start_s: float
    end_s: float
    reward: float | None = None
    grade_s: float | None = None
    advantage: float | None = None
    stale_tokens: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    """What reward functions logged of it."""
    prompt_text: str | None = None
    completion: str | None = None
    answer: str | None = None
    completion_ids: NDArray[np.int32] | None = None
    program: CodeRun | None = None
    conversation: EpisodeRecord | None = None

    def numbers(self) -> tuple[object, ...]:
        """Values of ``REQUIRED``."""
        return (
            self.prompt,
            self.attempt,
            self.sample_index,
            self.step,
            self.round_kind,
            self.worker,
            self.weights_version,
            self.prompt_tokens,
            self.tokens,
            self.reward,
            self.finish_reason,
            self.state,
            self.start_s,
            self.end_s,
            self.grade_s,
            _TRUNCATED.get(self.finish_reason),
            self.advantage,
            self.stale_tokens,
        )


class SampleLog:
    """Collects the rows of a run.

    Args:
        folder: the run's folder.
        config: what is kept besides numbers.
        last_step: rows of later steps, left by a crash, are dropped; -1 drops all of them.
        say: told in one line when rows cannot be written (they are tried again later), when a
            damaged file is moved aside, and when the table reaches its size limit.
        rewards: names of the reward functions, each of which gets a column.
        programs: whether a reward runs programs: then there are ``PROGRAM``'s columns.
        turns: whether an environment takes part: then there are those of ``TURNS``.
        flush_s: longest time, seconds, that rows of finished steps wait in memory.
    """

    def __init__(
        self,
        folder: Path,
        config: SamplesConfig | None = None,
        *,
        last_step: int = -1,
        say: Callable[[str], None],
        rewards: Sequence[str] = (),
        programs: bool = False,
        turns: bool = False,
        flush_s: float = 10.0,
    ) -> None:
        config = config or SamplesConfig()
        self._folder = folder
        self._say = say
        self._texts, self._token_ids = config.texts, config.token_ids
        self._limit = int(config.max_gb * _GB)
        self._rewards = tuple(rewards)
        self._programs = programs
        self._turns = turns
        self._schema = self._columns()
        self._rows: list[tuple[object, ...]] = []
        self._extras: list[Mapping[str, str]] = []
        self._bytes = 0
        self._unwritten: list[bytes] = []
        """Parts, encoded once, for which the disk had no room."""
        self._flush_s, self._flushed_s = flush_s, time.monotonic()
        self._told = self._forgot = False
        table.mend(folder, say)
        self._next = table.cut(folder, last_step)
        self._size = sum(path.stat().st_size for path in sample_columns.files(folder))

    def _columns(self) -> dict[str, pl.DataType]:
        rewards = {sample_columns.REWARD + name: pl.Float32() for name in self._rewards}
        return {
            **sample_columns.REQUIRED,
            **rewards,
            **(sample_columns.TEXTS if self._texts else {}),
            **(sample_columns.TOKEN_IDS if self._token_ids else {}),
            **(sample_columns.PROGRAM if self._programs else {}),
            **(sample_columns.TURNS if self._turns else {}),
        }

    def add(self, row: SampleRow) -> None:
        """Add an attempt whose fate is known. Costs some microseconds.

        What the configuration does not keep is not looked at.
        """
        values = (*row.numbers(), *(row.rewards.get(name) for name in self._rewards))
        self._bytes += _ROW_BYTES + sum(map(len, row.extra.values()))
        if self._texts:
            texts = (row.prompt_text, row.completion, row.answer)
            values += texts
            self._bytes += sum(len(text or "") for text in texts)
        if self._token_ids:
            ids = row.completion_ids
            values += (None if ids is None else pl.Series(ids),)
            self._bytes += 0 if ids is None else ids.nbytes
        if self._programs:
            values += _program(row.program)
        if self._turns:
            values += _turns(row.conversation, self._texts)
        self._rows.append(values)
        self._extras.append(row.extra)
        if self._bytes >= _FLUSH_BYTES:
            self.flush()

    def end_step(self) -> None:
        """A step's rows are all there: those that have waited long are written."""
        if time.monotonic() - self._flushed_s >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as one part, after those that did not fit. Call it before each
        checkpoint."""
        if self._rows:
            self._unwritten.append(self._encode())
            self._rows.clear()
            self._extras.clear()
        self._bytes, self._flushed_s = 0, time.monotonic()
        while self._unwritten:
            part = self._folder / sample_columns.PARTS / f"part-{self._next:06d}.parquet"
            try:
                part.parent.mkdir(exist_ok=True)
                replace_file(part, self._unwritten[0])
            except OSError as error:
                if not self._told:
                    self._say(f"{part}: cannot be written ({error}); rows are kept in memory")
                self._told = True
                return
            self._told = False
            self._next += 1
            self._size += len(self._unwritten.pop(0))
            self._keep_small()

    def _encode(self) -> bytes:
        columns = dict(zip(self._schema, zip(*self._rows, strict=True), strict=True))
        logged = {sample_columns.EXTRA + n: n for n in sorted({n for e in self._extras for n in e})}
        columns |= {column: tuple(e.get(n) for e in self._extras) for column, n in logged.items()}
        schema = self._schema | {column: pl.String() for column in logged}
        try:
            frame = pl.DataFrame(columns, schema=schema)
        except UnicodeEncodeError:  # half of a surrogate pair, from JSON
            frame = pl.DataFrame({n: _encodable(v) for n, v in columns.items()}, schema)
        buffer = io.BytesIO()
        frame.write_parquet(buffer, compression="zstd")
        return buffer.getvalue()

    def _keep_small(self) -> None:
        if not self._limit or self._size <= self._limit:
            return
        if not self._forgot:
            self._say(
                f"{self._folder}: the table of responses has reached samples.max_gb="
                f"{self._limit / _GB:g}: the oldest texts go, the numbers stay"
            )
        self._forgot = True
        try:
            self._size = table.forget(self._folder, self._limit)
        except (OSError, pl.exceptions.PolarsError) as error:
            self._say(f"{self._folder}: old texts cannot be dropped ({error})")

    def close(self) -> None:
        """Flush and merge the parts into ``samples.parquet``."""
        self.flush()
        try:
            table.merge(self._folder, self._say)
        except OSError as error:
            final = self._folder / sample_columns.FINAL
            self._say(f"{final}: cannot be written ({error}); its parts stay")
            return
        self._size = sum(path.stat().st_size for path in sample_columns.files(self._folder))
        self._keep_small()


def _encodable(values: Sequence[object]) -> list[object]:
    return [v.encode(errors="replace").decode() if isinstance(v, str) else v for v in values]


def _program(run: CodeRun | None) -> tuple[object, ...]:
    if run is None:
        return (None,) * len(sample_columns.PROGRAM)
    return run.verdict, list(run.tests), list(run.cpu_s), run.level, run.forgeable


def _turns(conversation: EpisodeRecord | None, texts: bool) -> tuple[object, ...]:
    if conversation is None:
        return (None,) * len(sample_columns.TURNS)
    turns = conversation.turns
    return (
        [turn.sampled for turn in turns],
        [turn.added for turn in turns],
        [turn.wait_s for turn in turns],
        conversation.calls,
        conversation.failed_calls,
        dumps(conversation.messages).decode() if texts and conversation.messages else None,
    )
