"""TRL's completion logs (``log_completions``): ``completions/completions_STEP.parquet``.

Columns: ``step, prompt, completion``, one a reward function, ``advantage``, and newer ones
``mode`` and what the user logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats import texts
from rollpacker.polytrace.formats.lines import Note, silent
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


def batches(
    files: Sequence[Path], note: Note = silent
) -> Iterator[tuple[pl.DataFrame, list[tuple[str, str]]]]:
    """Each file's table, with prompt and completion of its rows as texts; repeated ones once.

    Raises ``TraceError``.
    """
    seen: dict[int, Path] = {}
    for path in files:
        frame = read_table(path, COLUMNS)
        whole_numbers(path, frame, ("step",))
        both = frame.select("prompt", "completion").iter_rows()
        batch = [(texts.said(prompt), texts.said(completion)) for prompt, completion in both]
        first = seen.setdefault(hash(tuple(batch)), path)
        if first != path:
            note(f"{path}: the same completions as in {first.name}: counted once")
        else:
            yield frame, batch


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a completion. Raises ``TraceError``.

    A prompt's id is a hash of its text. The reward is the plain sum of the reward columns (the
    log has no weights). Texts are not kept. TRL logs the latest batch again when it optimises on
    it for several steps: such a file counts once.
    """
    rows = texts.Rows(reading, NAME)
    names: set[str] = set()
    for frame, batch in batches(files, reading.note):
        records = frame.to_dicts()
        floats = [name for name, kind in frame.schema.items() if kind.is_float()]
        rewards = [name for name in floats if name not in _NOT_REWARDS]
        names |= set(rewards)
        for row, both in zip(records, batch, strict=True):
            scores = [row[name] for name in rewards]
            given = [score for score in scores if score is not None and score == score]
            rows.add(
                row,
                both,
                step=row["step"],
                domain="validation" if row.get("mode") == "eval" else None,
                reward=sum(given) if given else None,
                rest={name: row[name] for name in ("mode", "advantage", *rewards) if name in row},
            )
    trace = rows.trace()
    if len(names) > 1:
        columns = ", ".join(sorted(names))
        reading.note(f"{reading.task}: reward is the sum of {columns}; the log has no weights")
    return trace
