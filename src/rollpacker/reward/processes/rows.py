"""Rows of many kilobytes go to a grading process once, and its jobs refer to them by a number.

A smaller row is sent with every job: that costs less than to know who has it. A process keeps large
ones as the bytes that came, so that a function which changes its row changes no other response's.
What it keeps is bounded by the driver, which drops what was not used for longest, and all of it at
a step's end.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.processes.frames import frame

LARGE = 1 << 16
"""Bytes from which on a row is sent once."""
MOST = 1 << 28
"""Bytes of the rows that a process keeps."""

_NO_JOB = 0
"""In place of a job's number: the frame is about a row, and drops it where nothing follows the
row's number."""
_HEAD = struct.Struct("<QQ")
ABOUT_A_ROW = bytes(8)
"""How such a frame begins."""

Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Large:
    """A row that is kept, which holds its identity; ``packed`` until it has been sent."""

    number: int
    row: Row
    size: int
    packed: bytes | None


class SentRows:
    """The driver's account of large rows: which there are, and which process has them.

    Args:
        most: bytes that a process keeps beside what its newest job needs.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._large: dict[int, _Large] = {}
        self._held: dict[object, set[int]] = {}
        self._next = 0
        self._bytes = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._large or self._held)

    def number(self, row: Row) -> int | None:
        """Of a large row that is known."""
        known = self._large.get(id(row))
        return None if known is None else known.number

    def learn(self, rows: Iterable[Row]) -> bool:
        """Whether large rows are among these that were not known. Raises what pickle raises."""
        before = self._next
        for row in {id(row): row for row in rows if id(row) not in self._large}.values():
            packed = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
            if LARGE <= len(packed) <= self._most:
                self._next += 1
                self._large[id(row)] = _Large(self._next, row, len(packed), packed)
                self._bytes += len(packed)
        return self._next > before

    def frames(self, rows: Iterable[Row], process: object) -> list[bytes]:
        """What ``process`` is to be sent before a job with these rows. Raises what pickle does."""
        held = self._held.get(process, set[int]())
        used = [self._used(row) for row in {id(row): row for row in rows}.values()]
        needed = [large for large in used if large is not None]
        if not needed and not held:
            return []
        sent = [
            frame(_HEAD.pack(_NO_JOB, each.number) + _packed(each))
            for each in needed
            if each.number not in held
        ]
        self._shrink()
        known = {each.number for each in self._large.values()}
        known |= {each.number for each in needed}
        dropped = held - known
        self._held[process] = (held - dropped) | {each.number for each in needed}
        return [*map(_drop, sorted(dropped)), *sent]

    def _used(self, row: Row) -> _Large | None:
        """A large row, which is from now on the one that was used last."""
        known = self._large.pop(id(row), None)
        if known is not None:
            self._large[id(row)] = known
        return known

    def _shrink(self) -> None:
        while self._bytes > self._most:
            self._bytes -= self._large.pop(next(iter(self._large))).size

    def forget(self) -> dict[object, list[bytes]]:
        """No row is needed any more: the frames that say so, by process."""
        held, self._held = self._held, {}
        self._large.clear()
        self._bytes = 0
        return {process: [_drop(number) for number in sorted(held[process])] for process in held}

    def lost(self, process: object) -> None:
        """A process has ended with all that it had."""
        self._held.pop(process, None)


def _packed(large: _Large) -> bytes:
    packed, large.packed = large.packed, None
    return packed or pickle.dumps(large.row, pickle.HIGHEST_PROTOCOL)


def _drop(number: int) -> bytes:
    return frame(_HEAD.pack(_NO_JOB, number))


class KeptRows:
    """A grading process's own: the bytes of large rows, by number."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def take(self, payload: bytes) -> None:
        """Keep or drop what a frame is about."""
        _, number = _HEAD.unpack_from(payload)
        if len(payload) == _HEAD.size:
            del self._packed[number]
        else:
            self._packed[number] = payload

    def load(self, number: int) -> Row:
        """A copy. Raises what pickle raises."""
        return pickle.loads(memoryview(self._packed[number])[_HEAD.size :])
