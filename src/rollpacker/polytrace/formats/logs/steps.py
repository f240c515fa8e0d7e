"""The training step that the names of files and folders tell: one rule for all trainers."""

from __future__ import annotations

import re
from pathlib import Path

from rollpacker.polytrace.formats.opened import bare

_WORD = re.compile(
    r"(?:step|iteration|iter|rollout|epoch)s?[_\-=. ]?(\d{1,9})(?!\d)", re.IGNORECASE
)
_OTHER = re.compile(
    r"(?:rank|worker|shard|part|node|gpu|dp|tp|pp|proc|seed|v)[_\-=]?\d+(?:[_\-]?of[_\-]?\d+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![a-zA-Z\d])(\d{1,9})(?![a-zA-Z\d])")
_LAST = re.compile(r"(?<!\d)(\d{1,9})$")
_FOLDER = re.compile(r"(?:^|[_\-.])(?:global_)?steps?[_\-=.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_FOLDERS_UP = 4


def in_name(path: Path, numbers: bool) -> int | None:
    """What stands after the word step, in the file's name or else in a folder's; with ``numbers``
    else the last number of the file's name that counts nothing else (ranks, shards, parts)."""
    name = bare(path).partition(".json")[0].removesuffix(".parquet").removesuffix(".table")
    told = _WORD.search(name) or _above(path)
    if told is None and numbers:
        rest = _OTHER.sub("", name)
        found = _NUMBER.findall(rest)
        if found:
            return int(found[-1])
        told = _LAST.search(rest)
    return None if told is None else int(told[1])


def _above(path: Path) -> re.Match[str] | None:
    folders = path.resolve().parts[-1 - _FOLDERS_UP : -1]
    return next((told for name in reversed(folders) if (told := _FOLDER.search(name))), None)


def is_of_steps(folder: Path) -> bool:
    """Whether a folder holds a step's files, and is no task of its own."""
    return _FOLDER.search(folder.name) is not None
