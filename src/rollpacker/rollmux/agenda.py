"""What repacking still has to try, in order and each thing once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Literal

Kind = Literal["move", "inside", "dissolve", "swap"]


class Agenda:
    """A queue without duplicates; asking whether something is on it takes no search."""

    def __init__(self) -> None:
        self._things: OrderedDict[tuple[Kind, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[tuple[Kind, str]]:
        return iter(self._things)

    def add(self, kind: Kind, name: str) -> None:
        """Behind all others, unless it is there."""
        self._things.setdefault((kind, name))

    def first(self, kind: Kind, name: str) -> None:
        """Before all others."""
        self._things[kind, name] = None
        self._things.move_to_end((kind, name), last=False)

    def extend(self, things: Iterable[tuple[Kind, str]]) -> None:
        """Add several."""
        for kind, name in things:
            self.add(kind, name)

    def pop(self) -> tuple[Kind, str]:
        """Take the first."""
        return self._things.popitem(last=False)[0]
