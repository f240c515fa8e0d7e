"""TRL's completion logs (``log_completions``): ``completions/completions_STEP.parquet``.

Columns: ``step, prompt, completion``, one a reward function, ``advantage``, and newer ones
``mode`` and what the user logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.polytrace.formats import texts
from rollpacker.polytrace.formats.columns import pack, samples
from rollpacker.polytrace.formats.lines import Record
from rollpacker.polytrace.formats.reading import Reading
from rollpacker.polytrace.formats.tables import read_table, whole_numbers
from rollpacker.polytrace.schema import Trace

NAME = "trl"
COLUMNS = ("step", "prompt", "completion")
"""What marks a table as a completion log."""
_NOT_REWARDS = {
    *COLUMNS,
    "mode",
    "advantage",
    *texts.RESPONSE_COUNTS,
    *texts.PROMPT_COUNTS,
    *texts.RESPONSE_IDS,
    *texts.PROMPT_IDS,
}


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a completion. Raises ``TraceError``.

    A prompt's id is a hash of its text. The reward is the plain sum of the reward columns (the
    log has no weights). Texts are not kept. TRL logs the latest batch again when it optimises on
    it for several steps: such a file counts once.
    """
    rows: list[dict[str, Any]] = []
    seen: dict[int, Path] = {}
    names: set[str] = set()
    guessed = 0
    for path in files:
        frame = read_table(path, COLUMNS)
        whole_numbers(path, frame, ("step",))
        batch = [(texts.said(row["prompt"]), texts.said(row["completion"])) for row in _rows(frame)]
        first = seen.setdefault(hash(tuple(batch)), path)
        if first != path:
            reading.note(f"{path}: the same completions as in {first.name}: counted once")
            continue
        rewards = _rewards(frame)
        names |= set(rewards)
        for row in _places(_rows(frame), batch, reading.task, rewards):
            guessed += row.pop("guessed")
            rows.append(row)
    if guessed:
        reading.note(texts.approximated(reading.task, guessed, len(rows)))
    if len(names) > 1:
        columns = ", ".join(sorted(names))
        reading.note(f"{reading.task}: reward is the sum of {columns}; the log has no weights")
    return Trace(samples=samples(rows))


def _rows(frame: pl.DataFrame) -> list[Record]:
    return frame.to_dicts()


def _rewards(frame: pl.DataFrame) -> list[str]:
    return [
        name for name, kind in frame.schema.items() if name not in _NOT_REWARDS and kind.is_float()
    ]


def _places(
    rows: list[Record], batch: list[tuple[str, str]], task: str, rewards: list[str]
) -> list[dict[str, Any]]:
    places: dict[tuple[int, str], int] = {}
    found: list[dict[str, Any]] = []
    for row, (prompt, completion) in zip(rows, batch, strict=True):
        key = (row["step"], texts.prompt_id(prompt))
        place = places.get(key, 0)
        places[key] = place + 1
        tokens = texts.counted(row, texts.RESPONSE_COUNTS, texts.RESPONSE_IDS)
        before = texts.counted(row, texts.PROMPT_COUNTS, texts.PROMPT_IDS)
        given = [row[name] for name in rewards if row[name] is not None and row[name] == row[name]]
        rest = {name: row[name] for name in ("mode", "advantage", *rewards) if name in row}
        found.append(
            {
                "task": task,
                "step": row["step"],
                "prompt": key[1],
                "index": place,
                "domain": "validation" if row.get("mode") == "eval" else None,
                "prompt_tokens": texts.estimate(prompt) if before is None else before,
                "response_tokens": texts.estimate(completion) if tokens is None else tokens,
                "state": "kept",
                "reward": sum(given) if given else None,
                "extra": pack(NAME, rest),
                "guessed": tokens is None,
            }
        )
    return found
