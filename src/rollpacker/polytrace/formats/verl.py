"""verl's rollout dumps (``trainer.rollout_data_dir``): ``STEP.jsonl``, one response a line.

Keys: ``input, output, gts, score, step`` and whatever the reward returned beside the score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, field_validator

from rollpacker.polytrace.formats import texts
from rollpacker.polytrace.formats.lines import Count, Record, Text, records
from rollpacker.polytrace.formats.reading import Reading
from rollpacker.polytrace.schema import Trace, TraceError

NAME = "verl"
_HELD = ("input", "output", "score", "step")


class Line(BaseModel):
    """One response."""

    input: Text
    output: Text
    step: Count | None = None
    score: object = None

    @field_validator("score")
    @classmethod
    def _number(cls, score: object) -> object:
        if score is not None and not isinstance(score, int | float):
            raise ValueError("score: expected a number")
        return score


def read(files: Sequence[Path], reading: Reading) -> Trace:
    """One row a line. Raises ``TraceError``.

    A prompt's id is a hash of its text. Texts are not kept; other keys are, in ``extra``.
    """
    rows = texts.Rows(reading, NAME)
    dropped = (*_HELD, *texts.RESPONSE_IDS, *texts.PROMPT_IDS)
    for path in files:
        for number, record in records(path, Line):
            score, domain = record.get("score"), record.get("data_source")
            rows.add(
                record,
                (record["input"], record["output"]),
                step=step_of(record, path, number),
                domain=domain if isinstance(domain, str) else None,
                reward=None if score is None else float(score),
                rest={key: value for key, value in record.items() if key not in dropped},
            )
    return rows.trace()


def step_of(record: Record, path: Path, number: int) -> int:
    """Of training: what the line says, or the number in the name of its file."""
    if record.get("step") is not None:
        return record["step"]
    name = re.search(r"(?<!\d)(\d{1,9})$", path.stem)
    if name is None:
        raise TraceError(f"{path}, line {number}: step: missing, and the file's name has none")
    return int(name[1])
