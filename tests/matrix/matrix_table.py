"""The table: for each leaf a run that sets it and a function that says what it did there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from matrix_runs import Described, Ran

Effect = Callable[[Ran], None]
"""Asserts what a leaf is for. ``AssertionError`` is a run in which it had no effect."""

TABLE = yaml.safe_load((Path(__file__).parent / "matrix.yaml").read_text(encoding="utf-8"))
_ROW = re.compile(
    r"(?P<leaves>.+) @ (?P<run>[\w-]+)( against (?P<against>[\w-]+))?"
    r"( instead (?P<key>[\w.]+)=(?P<value>.*))?"
)
RUNS: dict[str, Described] = {}
ENTRIES: list[Entry] = []


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One leaf's effect.

    Args:
        leaf: as ``matrix_tree.leaves`` names it.
        run: name of a run that sets it.
        holds: the effect.
        against: a run in which the effect must not hold.
        instead: dotted keys for the run without the leaf, where that would be no valid run.
    """

    leaf: str
    run: str
    holds: Effect
    against: str
    instead: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slow(self) -> bool:
        """Whether it needs a run that is not in the default suite."""
        return RUNS[self.run].slow or RUNS[self.against].slow

    @property
    def without(self) -> Described:
        """The same run without the leaf."""
        return RUNS[self.run].without(self.leaf, **self.instead)


def described(name: str, keys: Mapping[str, Any], **options: Any) -> None:
    """Put a run into the table; ``options`` are those of ``Described``."""
    assert name not in RUNS, f"two runs are named {name}"
    RUNS[name] = Described(name=name, keys=keys, **options)


def effect(
    *leaves: str, run: str, against: str = "plain", instead: Mapping[str, Any] | None = None
) -> Callable[[Effect], Effect]:
    """Say what some leaves do in a run; ``against`` is a run where they do not."""

    def note(holds: Effect) -> Effect:
        for leaf in leaves:
            entry = Entry(leaf=leaf, run=run, holds=holds, against=against, instead=instead or {})
            ENTRIES.append(entry)
        return holds

    return note


def _described_in_table() -> None:
    for name, told in TABLE["runs"].items():
        base = told.pop("like", None)
        options = {key: told.pop(key) for key in ("slow", "refused") if key in told}
        described(name, {**(RUNS[base].keys if base else {}), **told}, **options)


_described_in_table()


def take_rows(names: Mapping[str, Any]) -> None:
    """The effects of the table, whose expressions may use ``names``."""
    for row, text in TABLE["effects"].items():
        found = _ROW.fullmatch(row)
        assert found, row
        instead = {found["key"]: yaml.safe_load(found["value"])} if found["key"] else None
        told = effect(
            *found["leaves"].split(),
            run=found["run"],
            against=found["against"] or "plain",
            instead=instead,
        )
        told(_holds(text, names))


def _holds(text: str, names: Mapping[str, Any]) -> Effect:
    code = compile(text, text, "eval")

    def holds(ran: Ran) -> None:
        assert eval(code, {**names, "ran": ran}), text

    return holds


def happens(holds: Effect, ran: Ran) -> bool:
    """Whether an effect is seen in a run; one that broke off shows none."""
    if ran.broken:
        return False
    try:
        holds(ran)
    except AssertionError:
        return False
    return True
