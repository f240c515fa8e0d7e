"""Reports of real runs with an environment."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_jobs import cli_here, metrics, run, table
from test_episode_runs import ECHO, TALKING, Talkshop

from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading.responses import find
from rollpacker.report.reading.run_folder import load_run

SLOW: dict[str, Any] = TALKING | {
    "environment": ECHO | {"options": {"pause_s": 0.02}},
    "devices__per_node": 2,
    "epochs": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose environment takes its time."""
    shop = Talkshop(tmp_path_factory.mktemp("slow"))
    return run(shop.config("slow", "exact", **SLOW))[0]


def test_the_bubble_is_that_of_the_step_without_its_waits(folder: Path) -> None:
    """The journal tells of a turn's end a moment after the run's clock, of its begin before."""
    drawn = Gantt(load_run(folder))
    for line in metrics(folder):
        step, said = line["step"], line["bubble/rollout"]
        late = said - drawn.shares[step][0]
        assert -1e-4 < late < drawn.tools[step] <= said


def test_waits_of_the_journal_hold_those_of_the_samples(folder: Path) -> None:
    rows, waits = table(folder), load_run(folder).waits
    over = waits.join(rows.select("attempt", over="end_s"), on="attempt")
    times = over.with_columns(wait_s=pl.coalesce("end_s", "over") - pl.col("start_s"))
    by_attempt = times.group_by("attempt", maintain_order=True).agg(found="wait_s")
    for said, found in rows.join(by_attempt, on="attempt").select("wait_s", "found").rows():
        # The first is that for its beginning, which is no turn's.
        assert len(found) == 1 + len(said)
        assert all(mine >= its - 1e-5 for mine, its in zip(found[1:], said, strict=True))


def test_conversations_are_found_and_shown(folder: Path) -> None:
    [row, *_] = find(folder, pytest.fail, grep="more").rows
    assert "more" not in row["completion"], "which is in the prompt, before the first turn"
    done = cli_here("samples", folder, "--grep", "more", "--limit", 1)
    assert done.returncode == 0
    assert "[user]\nmore\n[assistant] turn 1: " in done.stdout
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Turns and tools" in page
    assert '"cat":"environment"' in (folder / "timeline.json").read_text(encoding="utf-8")
