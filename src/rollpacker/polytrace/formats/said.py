"""Read the texts or token ids of responses, from our runs and from trainers' logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl

from rollpacker.core.sample_table import files as table_files
from rollpacker.polytrace.formats import detect
from rollpacker.polytrace.formats.files import MOST, Copied, Reading, Repeats, read_table, silent
from rollpacker.polytrace.formats.logs import texts
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.formats.logs.responses import PromptIds
from rollpacker.polytrace.formats.logs.responses import responses as log_responses
from rollpacker.polytrace.formats.logs.texts import RESPONSE_IDS

_NEEDED = ["step", "prompt", "attempt", "finish_reason"]


@dataclass(frozen=True, slots=True)
class Said:
    """One response that ended by itself or at the longest length. ``prompt`` is the prompt's id.
    ``said`` are token ids if the log has them, else the text."""

    step: int
    prompt: str
    said: list[int] | str


def responses(path: Path, task: str | None = None, *, texts_too: bool = True) -> Iterator[Said]:
    """Yield the responses of a trace (or of one task), step by step within a run or a file.
    Formats without texts yield nothing. Without ``texts_too``, only responses with logged token
    ids are yielded. Raises ``TraceError``."""
    repeats = Repeats()
    for source in detect.sources(path):
        if task in (None, source.task):
            for kind, files in source.files.items():
                if kind == "run":
                    yield from _of_runs(files)
                elif kind in LAYOUTS:
                    reading = Reading(task=source.task, note=silent, repeats=repeats)
                    yield from _of_logs(files, kind, reading, texts_too)


def _of_runs(paths: Sequence[Path]) -> Iterator[Said]:
    """Read one step at a time and only the needed columns, since texts may exceed the memory."""
    tables = [file for path in paths for file in (table_files(path) if path.is_dir() else [path])]
    if not tables:
        return
    for file in tables:
        read_table(file, _NEEDED, only=True)  # says what is wrong
    rows = pl.concat([pl.scan_parquet(file) for file in tables], how="diagonal_relaxed")
    columns = rows.collect_schema().names()
    said = [pl.col(name) for name in ("completion_ids", "completion") if name in columns]
    ended = rows.filter(pl.col("finish_reason").is_in(["stop", "length"]))
    for step in sorted(ended.select("step").unique().collect()["step"].to_list() if said else ()):
        of_step = ended.filter(pl.col("step") == step)
        for prompt, *given in of_step.select("prompt", *said).collect().iter_rows():
            known = [each for each in given if each is not None]
            if known:
                yield Said(step, prompt, known[0])


def _of_logs(paths: Sequence[Path], kind: str, reading: Reading, texts_too: bool) -> Iterator[Said]:
    """Read one file at a time, sorted by step, without responses that an earlier file ends with."""
    prompts = PromptIds(LAYOUTS[kind])
    for path in paths:
        found: list[Said] = []
        copied = Copied(reading.repeats, reading.task, path)
        for each in log_responses(path, kind, reading):
            ids = _ids(each.record)
            if ids is None and not texts_too:
                break  # a log has ids of all or of none
            if each.validation or each.completion is None:
                continue
            said = Said(each.step or 0, prompts.of(each), ids or texts.said(each.completion))
            found.append(said)
            step = None if LAYOUTS[kind].relogged else said.step
            if count := copied.again(each.unit, said.prompt, str(said.said), step):
                del found[-count:]
        copied.end()
        yield from sorted(found, key=lambda each: each.step)


def _ids(record: dict[str, Any]) -> list[int] | None:
    """Token ids, or None if the log has none or if they cannot be token ids."""
    for key in RESPONSE_IDS:
        ids = record.get(key)
        if isinstance(ids, list) and all(
            isinstance(each, int) and 0 <= each <= MOST for each in cast(list[Any], ids)
        ):
            return cast(list[int], ids)
    return None
