"""The paper's experiments: rows, jobs as data, and the full run (slow)."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from rollpacker.cli.simulate.reproduce import lines_of, reproduce_rows
from rollpacker.config import parse_as
from rollpacker.sim import reproduce
from rollpacker.sim.reproduce import FIGURES, missing, part, row, verl, within
from rollpacker.sim.world.machines import SimulationConfig


def test_status_follows_from_the_error() -> None:
    rows = [
        row("a", 2.0, 2.1),
        row("b", 2.0, 2.1, fitted=True),
        row("c", 2.0, 2.5, fitted=True),
        row("d", None, 2.5),
        missing("e", 2.0, "no model of it"),
    ]
    assert [r.status for r in rows] == [
        "predicted",
        "fitted",
        "not_reproduced",
        "predicted",
        "not_reproduced",
    ]
    assert rows[0].relative_error == pytest.approx(0.05)
    assert within(rows) == 2


@pytest.mark.parametrize("name", FIGURES)
def test_every_job_is_a_valid_simulation(name: str) -> None:
    for job in FIGURES[name].jobs().values():
        parse_as(SimulationConfig, job.config)


def test_a_seed_makes_another_job() -> None:
    job = verl("8k")
    assert job.seeded(1).key != job.seeded(2).key
    assert job.seeded(1).key == job.seeded(1).key
    assert reproduce.growing("off", 9.0).key != reproduce.growing("off", 8.0).key


def test_a_job_gives_the_same_result_again() -> None:
    job = part("8k", "trainer")
    short = replace(job, config=job.config | {"steps": 2})
    assert short.run() == short.run()


def test_each_part_of_rollpacker_is_faster_than_verl() -> None:
    def step_s(job: reproduce.PaperJob) -> float:
        return replace(job, config=job.config | {"steps": 3}).run().mean_step_s

    base = step_s(verl("8k"))
    assert base > step_s(part("8k", "tail batching")) > step_s(part("8k", "reward"))


def test_nothing_is_cut_at_80_columns_and_notes_are_under_the_table() -> None:
    name, note = "fig9/14B-16k/RollPacker over veRL", "no costs fit it and the other cells " * 3
    long = "fig11/16k/reward worker, streaming and tail batching"
    rows = [
        row(name, 2.0, 2.5, note=note),
        row("fig9/other", 2.0, 2.1),
        row(name, 2.0, 2.6, note=note),
        row(long, 0.7519, 0.5789),
    ]
    console = Console(width=80, file=StringIO(), record=True)
    for line in lines_of(rows, 1.0):
        console.print(line, soft_wrap=isinstance(line, str))
    said = console.export_text()
    cells = [[*map(str.strip, line.split("│"))] for line in said.splitlines() if "│" in line]
    names = " ".join(row[1] for row in cells)
    assert (names.count(name), names.count(long)) == (2, 1)
    assert ["0.7519", "0.5789", "-23%", "not reproduced", ""] in [row[2:7] for row in cells]
    assert said.count(f"(1) {note}") == 1
    assert "1 of 4 within 10% of the paper, 0 of them fitted to it, in 1 s" in said


def test_lengths_grow_to_the_cap() -> None:
    job = reproduce.growing("off", 9.0)
    config = parse_as(SimulationConfig, job.config)
    source = job.source(config)
    assert len(source.recorded) == reproduce.GROWING_STEPS * config.rollout.prompts_per_step
    first, last = source.recorded[0].lengths, source.recorded[-1].lengths
    assert first.max() <= reproduce.FIRST_CAP
    assert last.max() <= reproduce.LAST_CAP
    assert all(recorded.lengths.min() >= 1 for recorded in source.recorded)


@pytest.mark.slow
def test_the_paper_is_reproduced() -> None:
    rows = reproduce_rows(["table2", "fig11"], seeds=1)
    cells = [r for r in rows if r.name.startswith("table2/")]
    bars = [r for r in rows if r.name.startswith("fig11/") and r.paper is not None]
    assert (len(cells), len(bars)) == (12, 24)
    assert within(cells) >= 9
    assert within(bars) >= 20
