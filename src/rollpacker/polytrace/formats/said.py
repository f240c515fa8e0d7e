"""What responses of a log said, for whom lengths are not enough: runs of ours, verl's, TRL's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl

from rollpacker.core.sample_columns import files as table_files
from rollpacker.polytrace.formats import detect, texts, trl, verl
from rollpacker.polytrace.formats.lines import records
from rollpacker.polytrace.formats.tables import read_table


@dataclass(frozen=True, slots=True)
class Said:
    """One response that ended by itself or at the longest length.

    Args:
        step: of training.
        prompt: the same for all responses to it.
        said: token ids where the log has them, else the text without special tokens.
    """

    step: int
    prompt: str
    said: list[int] | str


def responses(path: Path, task: str | None = None) -> Iterator[Said]:
    """Those of a trace (of one of its tasks), step by step where it is; none where its format keeps
    no texts.

    Raises ``TraceError``.
    """
    for source in detect.sources(path):
        if task in (None, source.task):
            for kind, files in source.files.items():
                if kind == "run":
                    yield from _of_runs(files)
                elif kind == "verl":
                    yield from _of_verl(files)
                elif kind == "trl":
                    yield from _of_trl(files)


def _of_runs(paths: Sequence[Path]) -> Iterator[Said]:
    tables = [file for path in paths for file in (table_files(path) if path.is_dir() else [path])]
    for file in tables:
        frame = read_table(file, ["step", "prompt", "finish_reason"])
        kept = [name for name in ("completion_ids", "completion") if name in frame.columns]
        ended = frame.filter(pl.col("finish_reason").is_in(["stop", "length"]))
        for step, prompt, *given in ended.select("step", "prompt", *kept).iter_rows():
            known = [each for each in given if each is not None]
            if known:
                yield Said(step, prompt, known[0])


def _of_verl(paths: Sequence[Path]) -> Iterator[Said]:
    for path in paths:
        for number, record in records(path, verl.Line):
            step = verl.step_of(record, path, number)
            yield Said(step, record["input"], _ids(record) or record["output"])


def _of_trl(paths: Sequence[Path]) -> Iterator[Said]:
    for frame, batch in trl.batches(paths):
        for row, (prompt, completion) in zip(frame.iter_rows(named=True), batch, strict=True):
            if row.get("mode") != "eval":
                yield Said(row["step"], prompt, _ids(row) or completion)


def _ids(record: dict[str, Any]) -> list[int] | None:
    for key in texts.RESPONSE_IDS:
        if isinstance(ids := record.get(key), list):
            return cast(list[int], ids)
    return None
