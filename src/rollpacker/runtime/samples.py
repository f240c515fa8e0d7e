"""The table of every rollout: one row per attempt, kept or not.

Rows are buffered and written as ``samples/part-*.parquet``; the end of a run, or a report, merges
the parts into ``samples.parquet``. A crash loses at most the rows since the last flush.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import polars as pl

from rollpacker.core.types import AttemptId, FinishReason, PromptId, RoundKind, WorkerId
from rollpacker.reward.base import CodeRun
from rollpacker.runtime.durable import replace_file

State = Literal["kept", "aborted", "dropped", "failed"]
"""``kept``: trained on; ``aborted``: lost its race; ``dropped``: graded, its group not trained on;
``failed``: the engine or the reward failed on it."""

SCHEMA: dict[str, pl.DataType] = {
    "prompt": pl.String(),
    "attempt": pl.Int64(),
    "sample_index": pl.Int32(),
    "step": pl.Int32(),
    "round_kind": pl.String(),
    "worker": pl.Int32(),
    "weights_version": pl.Int32(),
    "prompt_tokens": pl.Int32(),
    "tokens": pl.Int32(),
    "reward": pl.Float32(),
    "finish_reason": pl.String(),
    "state": pl.String(),
    "start_s": pl.Float64(),
    "end_s": pl.Float64(),
    "grade_s": pl.Float64(),
}
"""Columns of ``samples.parquet``; times are seconds since the run began."""

PROGRAM_SCHEMA: dict[str, pl.DataType] = {
    "code_verdict": pl.String(),
    "test_verdicts": pl.List(pl.String()),
    "test_cpu_s": pl.List(pl.Float32()),
    "sandbox_level": pl.String(),
    "forgeable": pl.Boolean(),
}
"""More columns, where a reward runs programs; null for responses that it did not grade."""

_FLUSH_ROWS = 1 << 16
_FINAL = "samples.parquet"
_PARTS = "samples"


class SampleLog:
    """Collects the rows of a run.

    Args:
        folder: the run's folder.
        last_step: rows of later steps, left by a crash, are dropped; -1 drops all of them.
        say: told once, in one line, when rows cannot be written; they are tried again later.
        programs: whether a reward runs programs: then there are ``PROGRAM_SCHEMA``'s columns.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int = -1,
        say: Callable[[str], None],
        programs: bool = False,
    ) -> None:
        self._folder = folder
        self._say = say
        self._schema = SCHEMA | PROGRAM_SCHEMA if programs else SCHEMA
        self._programs = programs
        self._rows: list[tuple[object, ...]] = []
        self._told = False
        self._next = _resume(folder, last_step)

    def add(
        self,
        *,
        prompt: PromptId,
        attempt: AttemptId,
        sample_index: int,
        step: int,
        round_kind: RoundKind,
        worker: WorkerId,
        weights_version: int,
        prompt_tokens: int,
        tokens: int,
        finish_reason: FinishReason | None,
        state: State,
        start_s: float,
        end_s: float,
        reward: float | None = None,
        grade_s: float | None = None,
        program: CodeRun | None = None,
    ) -> None:
        """Add an attempt whose fate is known. Costs about a microsecond."""
        self._rows.append(
            (
                prompt,
                attempt,
                sample_index,
                step,
                round_kind,
                worker,
                weights_version,
                prompt_tokens,
                tokens,
                reward,
                finish_reason,
                state,
                start_s,
                end_s,
                grade_s,
                *(_program(program) if self._programs else ()),
            )
        )
        if not len(self._rows) % _FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as one part. Call it before each checkpoint."""
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        schema = self._schema
        frame = pl.DataFrame(dict(zip(schema, columns, strict=True)), schema=schema)
        part = self._folder / _PARTS / f"part-{self._next:06d}.parquet"
        try:
            part.parent.mkdir(exist_ok=True)
            _write(frame, part)
        except OSError as error:
            if not self._told:
                self._say(f"{part}: cannot be written ({error}); rows are kept in memory")
            self._told = True
            return
        self._told = False
        self._rows.clear()
        self._next += 1

    def close(self) -> None:
        """Flush and merge the parts into ``samples.parquet``."""
        self.flush()
        try:
            merge(self._folder)
        except OSError as error:
            self._say(f"{self._folder / _FINAL}: cannot be written ({error}); its parts are kept")


def _program(run: CodeRun | None) -> tuple[object, ...]:
    if run is None:
        return (None,) * len(PROGRAM_SCHEMA)
    return run.verdict, list(run.tests), list(run.cpu_s), run.level, run.forgeable


def merge(folder: Path) -> pl.DataFrame:
    """All rows of a run in the order of writing; puts the parts into ``samples.parquet``.

    Only for a run that has ended: see ``read``. A crash in between loses and repeats no row,
    since an attempt's id is unique. Raises ``OSError``.
    """
    frame = read(folder)
    if (folder / _PARTS).is_dir():
        _write(frame, folder / _FINAL)
        shutil.rmtree(folder / _PARTS)
    return frame


def read(folder: Path) -> pl.DataFrame:
    """All rows that are on disk, of a run that may still be going on."""
    files = _files(folder)
    if not files:
        return pl.DataFrame(schema=SCHEMA)
    frame = pl.concat([pl.read_parquet(path) for path in files])
    return frame.unique(subset="attempt", keep="first", maintain_order=True)


def _files(folder: Path) -> list[Path]:
    final = [folder / _FINAL] if (folder / _FINAL).exists() else []
    return final + sorted((folder / _PARTS).glob("part-*.parquet"))


def _resume(folder: Path, last_step: int) -> int:
    """Drop the rows after ``last_step``; returns the number of the next part."""
    for path in _files(folder):
        frame = pl.read_parquet(path)
        kept = frame.filter(pl.col("step") <= last_step)
        if not kept.height:
            path.unlink()
        elif kept.height < frame.height:
            _write(kept, path)
    parts = [int(path.stem.rpartition("-")[2]) for path in (folder / _PARTS).glob("part-*")]
    return max(parts, default=-1) + 1


def _write(frame: pl.DataFrame, path: Path) -> None:
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    replace_file(path, buffer.getvalue())
