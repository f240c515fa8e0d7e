"""A run folder of our own: ``samples.parquet``, or its parts, beside ``journal.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from rollpacker.core.journal import prompts_in, segments
from rollpacker.core.sample_columns import NUMBERS
from rollpacker.core.sample_columns import files as table_files
from rollpacker.polytrace.formats import journal
from rollpacker.polytrace.formats.columns import samples
from rollpacker.polytrace.formats.reading import Reading
from rollpacker.polytrace.formats.tables import read_table, whole_numbers
from rollpacker.polytrace.schema import SAMPLES, Trace, TraceError

NAME = "run"
MARKS = ("prompt", "attempt", "sample_index", "step", "prompt_tokens", "tokens", "state")
"""Columns that mark a table as ours."""
_STATES = {"kept": "kept", "dropped": "filtered", "aborted": "aborted", "failed": "aborted"}
_EXTRA = ("attempt", "round_kind", "weights_version", "finish_reason", "state")


def read(folders: Sequence[Path], reading: Reading) -> Trace:
    """One row an attempt. Raises ``TraceError``.

    Items are run folders or tables. A run without a table is read from its journal. ``aborted``
    also stands for attempts that failed; one with ``truncated`` false had finished when it was
    aborted, so its length is whole. Worker is ``dp_rank``; ``end_s`` is when decoding ended.
    """
    found: list[pl.DataFrame] = []
    for path in folders:
        folder = path if path.is_dir() else path.parent
        files = table_files(path) if path.is_dir() else [path]
        if files:
            found.append(_frame(files, folder, reading))
        else:
            reading.note(f"{folder}: no samples.parquet, read from journal.jsonl")
            found.append(journal.read([folder / "journal.jsonl"], reading).samples)
    return Trace(samples=pl.concat(found) if found else samples([]))


def _frame(files: Sequence[Path], folder: Path, reading: Reading) -> pl.DataFrame:
    given: list[pl.DataFrame] = []
    for path in files:
        # Their texts may be larger than the memory.
        frame = read_table(path, list(NUMBERS), only=True)
        whole_numbers(path, frame, ("sample_index", "prompt_tokens", "tokens"))
        unknown = set(frame["state"].unique()) - set(_STATES)
        if unknown:
            known = ", ".join(_STATES)
            raise TraceError(f"{path}: state: unknown {unknown.pop()!r}; known: {known}")
        given.append(frame)
    frame = pl.concat(given).unique("attempt", keep="first", maintain_order=True)
    cap, domains = _from_journal(folder)
    ended = pl.when(pl.col("finish_reason").is_in(["stop", "length"])).then(
        pl.col("finish_reason") == "length"
    )
    extra = pl.struct(pl.struct(_EXTRA).alias(NAME)).struct.json_encode()
    frame = frame.with_columns(_extra=extra, _truncated=ended)
    frame = frame.with_columns(
        task=pl.lit(reading.task),
        index="sample_index",
        domain=pl.col("prompt").replace_strict(domains, default=None, return_dtype=pl.String()),
        response_tokens="tokens",
        cap=pl.lit(cap),
        truncated="_truncated",
        state=pl.col("state").replace_strict(_STATES, return_dtype=pl.String()),
        dp_rank="worker",
        turns=pl.lit(None),
        tools=pl.lit(None),
        reward_s="grade_s",
        reward_kind=pl.lit(_reward_kind(folder)),
        extra="_extra",
    )
    return frame.select(pl.col(name).cast(kind) for name, kind in SAMPLES.items())


def _from_journal(folder: Path) -> tuple[int | None, dict[str, str]]:
    """The cap and each prompt's domain, as far as the run's journal tells."""
    path = folder / "journal.jsonl"
    cap: int | None = None
    domains: dict[str, str] = {}
    if not path.exists():
        return cap, domains
    for part in segments(path):
        with part.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                # Few lines matter, and a journal has one for each attempt.
                if "PromptsDrawn" not in text and not text.startswith('{"meta"'):
                    continue
                said, found = _cap_and_domains(text, f"{part}, line {number}")
                cap = said or cap
                domains |= found
    return cap, domains


def _cap_and_domains(text: str, where: str) -> tuple[int | None, dict[str, str]]:
    """What a line tells: domains of prompts, a ``meta`` line the cap too; a torn one nothing."""
    try:
        line = json.loads(text)
        meta = line.get("meta")
        prompts = line["event"].get("prompts", ()) if meta is None else prompts_in(meta["state"])
        cap = None if meta is None else meta["settings"].get("cap")
        return cap, {each["id"]: each["domain"] for each in prompts}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if text.endswith("\n"):
            raise TraceError(f"{where}: not a journal ({error})") from error
        return None, {}


def _reward_kind(folder: Path) -> str | None:
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return "+".join(reward["function"] for reward in tree["rewards"])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: rewards: cannot be read ({json.dumps(str(error))})") from error
