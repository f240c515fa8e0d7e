"""The event log: what a cluster did, one JSON object a line, for people and for the checker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import IO, Any

from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import TraceJob


class EventLog:
    """Writes events in order of time; ``file`` None writes nothing."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file

    @property
    def wanted(self) -> bool:
        """Whether anybody will read it."""
        return self._file is not None

    def meta(self, settings: Settings, jobs: Iterable[TraceJob]) -> None:
        """The first line: caps, prices and what the jobs asked for and took."""
        if self._file is None:
            return
        prices = {"rollout": settings.prices.rollout, "train": settings.prices.train}
        head = {
            "kind": "meta",
            "memory_cap_gb": settings.memory_cap_gb,
            "prices": prices,
            "permits": settings.permits,
            "jobs": [_spec(job) for job in jobs],
        }
        self._file.write(json.dumps(head) + "\n")

    def write(self, now: float, kind: str, job: str | None, **more: Any) -> None:
        """One event."""
        if self._file is None:
            return
        line = {"t": now, "kind": kind, "job": job} | more
        self._file.write(json.dumps(line) + "\n")


def _spec(job: TraceJob) -> dict[str, Any]:
    data = job.to_json()
    solo = (job.rollout_s + job.train_s).round(6).tolist()
    return data | {"solo_s": solo}
