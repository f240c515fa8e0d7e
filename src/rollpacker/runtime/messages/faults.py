"""What goes wrong in a worker, as it is told to the driver."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollpacker.errors import one_line


class WorkerError(RuntimeError):
    """A worker has died or cannot do what it was told."""


class NoRoomError(ValueError):
    """A cluster has no room for what a run asks for, at this moment at least."""


def in_one_line(error: Exception) -> Exception:
    """What a callback raised, for whoever waits: as it is where it is meant for people, else with
    the place where it was raised."""
    if isinstance(error, ValueError | RuntimeError | OSError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    told = RuntimeError(f"the driver failed: {one_line(error)} ({place})")
    told.__cause__ = error
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why something could not be done.

    Args:
        kind: ``user``: the configuration's or the model's; ``storage``: a disk's, worth another
            try; ``crash``: the worker cannot go on.
        text: one line for the first two, a traceback or one line for a crash.
    """

    kind: Literal["user", "storage", "crash"]
    text: str

    def error(self) -> Exception:
        """To be raised where the work was asked for."""
        match self.kind:
            case "user":
                return ValueError(self.text)
            case "storage":
                return OSError(self.text)
            case "crash":
                return WorkerError(self.text)
