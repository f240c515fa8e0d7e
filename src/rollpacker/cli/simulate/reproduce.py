"""``rollpacker reproduce``: the papers' tables and figures in the simulator."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from rollpacker.cli.output import Shown, errors, shown, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rollpacker.sim.reproduce import PaperJob, ResultRow
    from rollpacker.sim.world.step import JobResult

_COLORS = {"predicted": "green", "fitted": "cyan", "not_reproduced": "red"}


@shown
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="table2, fig9, ... fig14, table3, table4, or all of these.",
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Jobs to average, each with other lengths.")] = 2,
    processes: Annotated[int, typer.Option(help="Simulations at once (0 takes one per core).")] = 0,
) -> Shown:
    """Simulate the paper's experiments with the real policies and compare.

    Example: rollpacker reproduce table2
    """
    from rollpacker.sim.reproduce import FIGURES

    if what not in ("all", *FIGURES):
        names = ", ".join((*FIGURES, "all"))
        raise ValueError(f"unknown table or figure {what!r}: choose {names}")
    if seeds < 1 or processes < 0:
        raise ValueError("--seeds must be 1 or more, and --processes 0 or more")
    began = time.perf_counter()
    rows = reproduce_rows(list(FIGURES) if what == "all" else [what], seeds, processes)
    wall = time.perf_counter() - began
    data = {"rows": [asdict(row) for row in rows], "wall_s": wall}
    return Shown(data, lines_of(rows, wall))


def reproduce_rows(names: Sequence[str], seeds: int, processes: int = 0) -> list[ResultRow]:
    """Rows of several figures. A job that several figures need is simulated once."""
    from rollpacker.sim.reproduce import FIGURES

    jobs = {name: FIGURES[name].jobs() for name in names}
    wanted = {
        seeded.key: seeded
        for group in jobs.values()
        for job in group.values()
        for seeded in (job.seeded(seed) for seed in range(seeds))
    }
    results = _simulate(wanted, processes or os.cpu_count() or 1)
    found: list[ResultRow] = []
    for name, group in jobs.items():
        of_name = {
            label: [results[job.seeded(seed).key] for seed in range(seeds)]
            for label, job in group.items()
        }
        found.extend(FIGURES[name].rows(of_name))
    return found


def _simulate(jobs: Mapping[str, PaperJob], processes: int) -> dict[str, JobResult]:
    """Run independent simulations in parallel. Results do not depend on the process."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        done = pool.map(methodcaller("run"), jobs.values())
        watched = track(done, "simulating", len(jobs), console=errors, transient=True)
        return dict(zip(jobs, watched, strict=True))


def lines_of(rows: Sequence[ResultRow], wall: float) -> Iterator[RenderableType]:
    """The table, its notes, and a summary."""
    notes = {note: n for n, note in enumerate(dict.fromkeys(r.note for r in rows if r.note), 1)}
    yield _table(rows, notes)
    yield from (f"({n}) {note}" for note, n in notes.items())
    yield _summary(rows, wall)


def _table(rows: Iterable[ResultRow], notes: Mapping[str, int]) -> Table:
    view = table_of("result", "paper", "ours", "error", title="The paper's results, simulated")
    view.add_column("status")
    view.add_column("note")
    view.columns[0].overflow = "fold"
    for column in view.columns[1:]:
        column.no_wrap = True
    for row in rows:
        error = "" if row.relative_error is None else f"{row.relative_error:+.0%}"
        paper = "" if row.paper is None else f"{row.paper:.4g}"
        status = f"[{_COLORS[row.status]}]{row.status.replace('_', ' ')}[/]"
        ours = "" if row.ours is None else f"{row.ours:.4g}"
        note = f"({notes[row.note]})" if row.note else ""
        view.add_row(row.name, paper, ours, error, status, note)
    return view


def _summary(rows: Sequence[ResultRow], wall: float) -> str:
    from rollpacker.sim.reproduce import within

    compared = [row for row in rows if row.paper is not None]
    fitted = sum(row.status == "fitted" for row in compared)
    return (
        f"{within(compared)} of {len(compared)} within 10% of the paper, {fitted} of them "
        f"fitted to it, in {wall:.0f} s"
    )
