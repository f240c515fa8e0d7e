"""The training step that the names of files and folders tell: one rule for all trainers."""

from __future__ import annotations

import re
from pathlib import Path

from rollpacker.polytrace.formats.files.opened import bare

_STEP, _ROUND, _EPOCH = (
    re.compile(rf"(?:{words})s?[_\-=. ]?(\d{{1,9}})(?!\d)", re.IGNORECASE)
    for words in ("step", "iteration|iter|rollout", "epoch")
)
"""The most telling first: of ``epoch_0_step_3`` and ``rollout_7_step_3`` it is the 3."""
_DATE = re.compile(
    r"(?<!\d)(?:19|20)\d\d([_\-.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?!\d)[_\-]?"
)
_TIME = re.compile(r"(?<!\d)[T_\- ]?(?:[01]\d|2[0-3])([_\-.:]?)[0-5]\d\1[0-5]\d(?!\d)[_\-]?")
_OTHER = re.compile(
    r"(?:epoch|rank|worker|shard|part|node|gpu|dp|tp|pp|proc|seed|v)[_\-=]?\d+"
    r"(?:[_\-]?of[_\-]?\d+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![a-zA-Z\d])(\d{1,9})(?![a-zA-Z\d])")
_LAST = re.compile(r"(?<!\d)(\d{1,9})$")
_FOLDER = re.compile(r"(?:^|[_\-.])(?:global_)?steps?[_\-=.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_FOLDERS_UP = 4


def in_name(path: Path, numbers: bool) -> int | None:
    """What stands after the word step, in the file's name or else in a folder's; with ``numbers``
    else the last number of the file's name that counts nothing else (ranks, shards, parts). A date
    is no step, nor is the time behind it where another number is left."""
    name = bare(path).partition(".json")[0].removesuffix(".parquet").removesuffix(".table")
    undated = _DATE.sub("", name)
    if undated != name:
        told = _in_text(_TIME.sub("", undated, count=1), path, numbers)
        if told is not None:
            return told
    return _in_text(undated, path, numbers)


def _in_text(name: str, path: Path, numbers: bool) -> int | None:
    told = _STEP.search(name) or _ROUND.search(name) or _above(path)
    if told is None and numbers:
        rest = _OTHER.sub("", name)
        found = _NUMBER.findall(rest)
        if found:
            return int(found[-1])
        told = _LAST.search(rest)
    told = told or _EPOCH.search(name)
    return None if told is None else int(told[1])


def _above(path: Path) -> re.Match[str] | None:
    folders = path.resolve().parts[-1 - _FOLDERS_UP : -1]
    return next((told for name in reversed(folders) if (told := _FOLDER.search(name))), None)


def is_of_steps(folder: Path) -> bool:
    """Whether a folder holds a step's files, and is no task of its own."""
    return _FOLDER.search(folder.name) is not None
