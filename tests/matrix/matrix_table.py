"""The table: for each leaf a run that sets it and a function that says what it did there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matrix_runs import Described, Ran

Effect = Callable[[Ran], None]
"""Asserts what a leaf is for. ``AssertionError`` is a run in which it had no effect."""

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


def happens(holds: Effect, ran: Ran) -> bool:
    """Whether an effect is seen in a run; one that broke off shows none."""
    if ran.broken:
        return False
    try:
        holds(ran)
    except AssertionError:
        return False
    return True
