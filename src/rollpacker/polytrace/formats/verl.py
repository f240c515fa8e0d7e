"""verl's rollout dumps (``trainer.rollout_data_dir``): ``STEP.jsonl``, one response a line.

Keys: ``input, output, gts, score, step`` and whatever the reward returned beside the score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator

from rollpacker.polytrace.formats import texts
from rollpacker.polytrace.formats.columns import pack, samples
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
    rows: list[dict[str, Any]] = []
    places: dict[tuple[int, str], int] = {}
    guessed = 0
    for path in files:
        for number, record in records(path, Line):
            step = _step(record, path, number)
            prompt = texts.prompt_id(record["input"])
            place = places.get((step, prompt), 0)
            places[step, prompt] = place + 1
            row = _row(record, reading.task)
            guessed += row.pop("guessed")
            rows.append({**row, "step": step, "prompt": prompt, "index": place})
    if guessed:
        reading.note(texts.approximated(reading.task, guessed, len(rows)))
    return Trace(samples=samples(rows))


def _step(record: Record, path: Path, number: int) -> int:
    if record.get("step") is not None:
        return record["step"]
    name = re.search(r"(?<!\d)(\d{1,9})$", path.stem)
    if name is None:
        raise TraceError(f"{path}, line {number}: step: missing, and the file's name has none")
    return int(name[1])


def _row(record: Record, task: str) -> dict[str, Any]:
    tokens = texts.counted(record, texts.RESPONSE_COUNTS, texts.RESPONSE_IDS)
    prompt = texts.counted(record, texts.PROMPT_COUNTS, texts.PROMPT_IDS)
    score, domain = record.get("score"), record.get("data_source")
    dropped = (*_HELD, *texts.RESPONSE_IDS, *texts.PROMPT_IDS)
    rest = {key: value for key, value in record.items() if key not in dropped}
    return {
        "task": task,
        "domain": domain if isinstance(domain, str) else None,
        "prompt_tokens": texts.estimate(record["input"]) if prompt is None else prompt,
        "response_tokens": texts.estimate(record["output"]) if tokens is None else tokens,
        "state": "kept",
        "reward": None if score is None else float(score),
        "extra": pack(NAME, rest),
        "guessed": tokens is None,
    }
