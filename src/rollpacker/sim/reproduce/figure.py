"""What an experiment consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.sim.reproduce.jobs import Job
from rollpacker.sim.reproduce.rows import Row
from rollpacker.sim.result import JobResult


@dataclass(frozen=True, slots=True)
class Figure:
    """A table or a figure of the paper.

    Args:
        title: what it shows.
        jobs: to simulate, by name.
        rows: from their results, one for each seed.
    """

    title: str
    jobs: Callable[[], Mapping[str, Job]]
    rows: Callable[[Mapping[str, Sequence[JobResult]]], Sequence[Row]]
