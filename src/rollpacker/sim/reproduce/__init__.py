"""The paper's tables and figures, from the real policies on simulated machines.

Nothing here is needed to simulate a job of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.sim.reproduce import (
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
    table2,
    table3,
    table4,
)
from rollpacker.sim.reproduce.jobs import PaperJob
from rollpacker.sim.reproduce.rows import ResultRow
from rollpacker.sim.world.result import JobResult


@dataclass(frozen=True, slots=True)
class Figure:
    """A table or a figure of the paper.

    Args:
        title: what it shows.
        jobs: to simulate, by name.
        rows: from their results, one for each seed.
    """

    title: str
    jobs: Callable[[], Mapping[str, PaperJob]]
    rows: Callable[[Mapping[str, Sequence[JobResult]]], Sequence[ResultRow]]


_MODULES = (table2, fig9, fig10, fig11, fig12, fig13, table3, table4, fig14)
FIGURES: dict[str, Figure] = {
    module.__name__.rpartition(".")[2]: Figure(module.TITLE, module.jobs, module.rows)
    for module in _MODULES
}
"""By the name of the table or figure."""
