"""What every reader gets: the task's name, whom to tell, and what was read before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.polytrace.formats.files.lines import Bad, Note, Problem, Record, stop
from rollpacker.polytrace.formats.files.opened import Tick, quiet

Count = Callable[[str], int]
"""How many tokens a text has."""
_CHANCE = 4
"""Fewer equal records in two tasks may be chance."""


class Repeats:
    """Steps and records that were read before: copies must not count twice."""

    def __init__(self) -> None:
        self.prints: dict[int, tuple[str, Path]] = {}
        self._steps: dict[int, str] = {}
        self._records: set[tuple[str, int]] = set()

    def fresh(
        self, path: Path, task: str, given: Sequence[Record], note: Note, *, least: int = _CHANCE
    ) -> list[Record]:
        """``given`` less the steps that another task has and the records that this task has.

        ``least``: fewer equal records of one step in two tasks may be chance.
        """
        prints = [hash(json.dumps(record, sort_keys=True)) for record in given]
        steps: dict[int, set[int]] = {}
        for record, key in zip(given, prints, strict=True):
            steps.setdefault(record["step"], set()).add(key)
        shared = {step for step, keys in steps.items() if self._elsewhere(keys, task, least)}
        for step in sorted(shared):
            owner = self._steps[hash(frozenset(steps[step]))]
            note(f"{path}: step {step} is the same as in {owner}: counted once")
        kept: list[Record] = []
        for record, key in zip(given, prints, strict=True):
            if record["step"] not in shared and (task, key) not in self._records:
                self._records.add((task, key))
                kept.append(record)
        repeated = sum(record["step"] not in shared for record in given) - len(kept)
        if repeated:
            note(f"{path}: {repeated} lines repeat earlier lines: counted once")
        return kept

    def _elsewhere(self, keys: set[int], task: str, least: int) -> bool:
        owner = self._steps.setdefault(hash(frozenset(keys)), task)
        return owner != task and len(keys) >= least


@dataclass(slots=True)
class Copied:
    """The responses of a file, or of each unit of it (a line that holds many), may begin with all
    of an earlier one's: tables that grow are written again and again. ``found`` counts them."""

    repeats: Repeats
    task: str
    path: Path
    found: Counter[Path] = field(default_factory=Counter[Path])
    _unit: int = 0
    _print: int = 0
    _count: int = 0

    def again(self, unit: int, *response: object) -> int:
        """With this response, how many of the last ones are all of an earlier file or unit."""
        if unit != self._unit:
            self.end()
            self._unit = unit
        self._print, self._count = hash((self._print, response)), self._count + 1
        task, path = self.repeats.prints.get(self._print, ("", self.path))
        if not task or (task != self.task and self._count < _CHANCE):
            return 0
        count, self._print, self._count = self._count, 0, 0
        self.found[path] += count
        return count

    def end(self) -> None:
        """The file or the unit is over."""
        self.repeats.prints.setdefault(self._print, (self.task, self.path))
        self._print = self._count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The circumstances of reading one task.

    Args:
        repeats: shared by the tasks of one trace.
        bad: told of a wrong record.
        left: told of what is left out: what a writer that was stopped has not written to its end;
            ``note`` is, by default.
        count: of texts whose tokens a log does not count; default: an estimate by characters.
    """

    task: str
    note: Note
    repeats: Repeats = field(default_factory=Repeats)
    bad: Bad = stop
    left: Bad | None = None
    tick: Tick = quiet
    count: Count | None = None

    def leave(self, problem: Problem) -> None:
        """Something is left out."""
        if self.left is None:
            self.note(f"{problem}: left out")
        else:
            self.left(problem)
