"""The one interface between deciding and doing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Policy(Protocol[In, Out]):
    """A pure state machine: events in, decisions out.

    It has no clock, no I/O and no global randomness, so the runtime and the simulator can drive
    the same one, and a journal replays to the same decisions.
    """

    def handle(self, now: float, event: In) -> Iterable[Out]:
        """Take one event at time ``now`` (seconds) and return what to do, in order."""
        ...
