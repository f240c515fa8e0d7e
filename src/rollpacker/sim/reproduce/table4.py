"""Table 4: finished responses are fetched as they come, or once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.sim.reproduce.jobs import PAPER_STREAMING, PaperJob
from rollpacker.sim.reproduce.rows import ResultRow, missing, row
from rollpacker.sim.reproduce.table2 import step_s
from rollpacker.sim.reproduce.table3 import streamed
from rollpacker.sim.world.result import JobResult

TITLE = "Seconds of a step by how responses are fetched, 7B/8k"
PAPER = {"20%": 128.6, "50%": 133.8}


def jobs() -> dict[str, PaperJob]:
    """The stream trainer of Table 3."""
    return {"asynchronous": streamed(PAPER_STREAMING)}


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Asynchronous fetching; the other is not offered."""
    ours = step_s(results["asynchronous"])
    why = "the policy streams every group as it is complete; fetching once is not offered"
    return [
        row("table4/asynchronous", 115.2, ours, fitted=True, note="the adaptive row of Table 3"),
        *(missing(f"table4/once at {at}", paper, why) for at, paper in PAPER.items()),
    ]
