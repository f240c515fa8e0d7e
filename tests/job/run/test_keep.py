"""What a run keeps: its best checkpoint, a bounded journal; what may change when it goes on."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from checkpoint_files import save
from runtime_jobs import Workshop, checkpoints, metrics, run, write_rows

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.polytrace import formats
from rollpacker.report.run_report import write_report
from rollpacker.runtime.record.checkpoint import Checkpoints
from rollpacker.sim.recorded.run_record import read_run

FIXED: dict[str, Any] = {"deterministic": True, "devices__per_node": 1, "epochs": 3}
METRIC = "eval/sampled_accuracy"
KEPT = {"every": 1, "keep": 2, "best": METRIC, "journal_mb": 0.03}


STOPPED, STEPS = 5, 9


@dataclass(frozen=True, slots=True)
class Best:
    """A run that was stopped and has gone on."""

    shop: Workshop
    folder: Path
    before: list[dict[str, Any]]
    """Its metrics when it was stopped."""
    said: str
    changes: dict[str, Any]
    """Its configuration from then on."""


def evaluated(shop: Workshop, rows: int) -> dict[str, Any]:
    held_out = write_rows(shop.folder / "held_out.jsonl", rows)
    return {"data": {"path": str(held_out)}, "every": 1, "threshold": 0.5}


def best_of(rows: list[dict[str, Any]]) -> tuple[int, float]:
    """Steps until the first of the highest values, and the value."""
    value = max(row[METRIC] for row in rows)
    return next(row["step"] + 1 for row in rows if row[METRIC] == value), value


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Best:
    """It goes on with another learning rate and one epoch more, its journal in many parts.

    In a race, prompts are drawn many steps before the long round that runs them.
    """
    shop = Workshop(tmp_path_factory.mktemp("best"), rows=17)
    changes = {**FIXED, "checkpoint": KEPT, "eval": evaluated(shop, 4)}
    folder, _ = run(shop.config("run", "race", steps=STOPPED, **changes))
    before = metrics(folder)
    changes |= {"epochs": 4, "steps": STEPS}
    again = shop.config("run", "race", **changes, train={"learning_rate": 1e-3})
    _, said = run(again, resume=True)
    return Best(shop, folder, before, said, changes)


def test_the_best_checkpoint_is_kept_and_named(best: Best) -> None:
    folder = best.folder
    step, value = best_of(metrics(folder))
    expected = {"step": step, "checkpoint": f"checkpoint-{step}", "metric": METRIC, "value": value}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["best"] == expected
    assert json.loads((folder / "best.json").read_text(encoding="utf-8")) == expected
    assert step <= STOPPED
    assert checkpoints(folder) == [step, STEPS - 1, STEPS]
    assert Checkpoints(folder).there(step)


def test_a_bounded_journal_is_read_whole(best: Best) -> None:
    folder = best.folder
    path = folder / "journal.jsonl"
    parts = journal.segments(path)
    assert len(parts) > 2
    assert sum(part.stat().st_size for part in parts) < 60_000
    whole = journal.replay(path, from_journal)
    alone = [journal.replay(part, from_journal) for part in parts[:-1]]
    assert whole.differences == []
    assert whole.unfinished is None
    assert all(part.differences == [] and part.events for part in alone)
    steps = [line["event"]["step"] for _, line in journal.read_all(path) if _starts(line)]
    assert steps == list(range(steps[0], STEPS))
    assert len(read_run(folder).steps) == len(steps)
    assert write_report(folder).exists()


def test_prompts_that_wait_are_known_when_their_lines_are_gone(best: Best) -> None:
    lines = [line for _, line in journal.read_all(best.folder / "journal.jsonl")]
    drawn = {prompt["id"] for line in lines for prompt in line.get("event", {}).get("prompts", ())}
    decisions = [each for line in lines for each in line.get("decisions", ())]
    begun = {each["prompt"] for each in decisions if each["kind"] == "StartAttempt"}
    assert begun - drawn
    assert begun <= set(read_run(best.folder).prompt_tokens)
    trace = formats.read(best.folder).samples
    assert not trace.filter(pl.col("prompt").is_in(list(begun)))["domain"].has_nulls()


def _starts(line: dict[str, Any]) -> bool:
    return line.get("event", {}).get("kind") == "StepStarted"


@pytest.mark.parametrize(
    "metric", ["eval/greedy_accuracy", pytest.param("eval/acuracy", marks=pytest.mark.slow)]
)
def test_a_metric_that_no_evaluation_has_is_said_before_the_first_step(
    tmp_path: Path, metric: str
) -> None:
    shop = Workshop(tmp_path, rows=4)
    changes = {**FIXED, "eval": evaluated(shop, 4), "checkpoint": {"best": metric}}
    with pytest.raises(ValueError, match=rf"have no metric '{metric}', only .*eval/sampled_acc"):
        run(shop.config("run", **changes))
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"checkpoint\.best=eval/x .* set eval\.every"):
        run(shop.config("other", **FIXED, checkpoint={"best": "eval/x"}))


def test_a_marker_counts_only_with_its_checkpoint(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"w")

    kept = Checkpoints(tmp_path, 2)
    save(kept, 1, write, {})
    kept.keep_best({"step": 1, "checkpoint": "checkpoint-1", "metric": "m", "value": 0.5})
    for step in (2, 3, 4):
        save(kept, step, write, {})
    assert checkpoints(tmp_path) == [1, 3, 4]
    again = Checkpoints(tmp_path, 2)
    save(again, 5, write, {})
    assert checkpoints(tmp_path) == [1, 4, 5]
    assert again.there(1)
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert not Checkpoints(tmp_path).there(1)
    (tmp_path / "best.json").write_bytes(b"{}")
    assert Checkpoints(tmp_path).marker() is None


def test_a_learning_rate_may_change_on_resume(best: Best) -> None:
    """The steps before it stay, those after it have it, and the optimizer goes on."""
    assert "train.learning_rate was 0.01 and is 0.001 from here on" in best.said
    assert "Adam" not in best.said
    rows = metrics(best.folder)
    assert rows[:STOPPED] == best.before
    rates = [1e-2] * STOPPED + [1e-3] * (STEPS - STOPPED)
    assert [row["learning_rate"] for row in rows] == rates
    with pytest.raises(ValueError, match=r"'train\.beta' was 0\.0, now 0\.1"):
        run(best.shop.config("run", "race", **best.changes, train={"beta": 0.1}), resume=True)
