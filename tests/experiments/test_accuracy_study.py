"""The study of accuracy by mode: its runs are valid, and its tables pair what belongs together."""

import dataclasses
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from rollpacker.config import load
from rollpacker.job.plan.checks import check

HERE = Path(__file__).parents[2] / "experiments" / "accuracy"
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
spec = importlib.util.spec_from_file_location("accuracy_run", HERE / "run.py")
assert spec is not None
study_run = importlib.util.module_from_spec(spec)
assert spec.loader is not None
sys.modules[spec.name] = study_run
spec.loader.exec_module(study_run)
from accuracy_results import (  # noqa: E402
    END,
    MARK,
    Difference,
    comparisons,
    curve,
    difference,
    kept,
    key_of,
    last,
    picture,
    pooled,
    tables,
)

STUDY = yaml.safe_load((HERE / "study.yaml").read_text(encoding="utf-8"))
FIRST = list(study_run.trials(STUDY, list(STUDY["tasks"]), 1, {"sums": "some/model"}))


def test_every_run_is_a_valid_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    kinds = set()
    for trial in FIRST:
        own = [f"seed={trial.seed}", f"train.learning_rate={trial.rate}"]
        config = load(Path(trial.config), [*trial.set, *own])
        check(config)
        assert config.devices.per_node == 1
        assert config.eval is not None
        prompts = int(config.data.options.get("size", 0))
        steps = config.steps or prompts // config.rollout.prompts_per_step
        assert config.eval.every * 4 <= steps
        kinds.add((trial.task, json.dumps(config.rollout.model_dump(mode="json"))))
    assert len({trial.folder(Path("out")) for trial in FIRST}) == len(FIRST)
    assert kinds
    assert {t.arm for t in FIRST if t.task == "tools"} == {
        arm for arm in STUDY["arms"] if not arm.startswith("partial")
    }
    assert {trial.model for trial in FIRST if trial.task == "sums"} == {"some/model"}


def test_a_task_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["run.py", "gdc"])
    with pytest.raises(SystemExit):
        study_run.main()
    assert "no task gdc: choose from gcd, chance, sums, tools" in capsys.readouterr().err


def test_rows_of_earlier_runs_stand_for_their_folders_until_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    here = tmp_path / "experiments" / "accuracy"
    for name, value in {"ROOT": tmp_path, "HERE": here, "RESULTS": tmp_path / "rows"}.items():
        monkeypatch.setattr(study_run, name, value)
    marked = f"words\n{MARK}before\n{END}more\n"
    for name in ("README.md", "docs/concepts.md", "experiments/accuracy/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(marked, encoding="utf-8")
    with (here / "README.md").open("a", encoding="utf-8") as page:
        page.write("<!-- tables -->\nthe ones before\n")
    trial = FIRST[0]
    made(trial.folder(tmp_path / "out"), [0.2, 0.4, 0.6], 100, 50)
    study_run.write([trial], {}, tmp_path / "out")
    rows = kept(tmp_path / "rows")
    assert key_of(trial.about) in rows

    study_run.write([trial], rows, tmp_path / "nothing here")
    assert kept(tmp_path / "rows") == rows
    assert (here / "plot.svg").read_text(encoding="utf-8").startswith("<svg ")
    text = (here / "README.md").read_text(encoding="utf-8")
    assert text.startswith("words\n")
    assert "before\n" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_text(encoding="utf-8").endswith(f"{END}more\n")
    assert "| off | 1 | 0.420 (0.42 to 0.42) |" in text
    assert "the ones before" not in text

    other = dataclasses.replace(trial, set=[*trial.set, "steps=1"])
    assert key_of(other.about) not in rows
    assert other.folder(tmp_path) != trial.folder(tmp_path)


def made(folder: Path, accuracies: list[float], tokens: int, steps: int) -> Path:
    """A run with evaluations after steps 2 and 4; ``tokens`` and decode steps of each step."""
    folder.mkdir(parents=True)
    lines = [
        {
            "step": n,
            "engine/steps": steps,
            "engine/generated_tokens": tokens,
            "engine/prefill_tokens": 10,
            "num_tokens": tokens * (n + 1),
            "policy_version_max_lag": n % 2,
            "tail/kept_vs_true_len": 1.0,
        }
        for n in range(4)
    ]
    lines[1]["eval/sampled_accuracy"] = accuracies[1]
    pl.DataFrame(
        {
            "prompt": ["a", "b"] * 8,
            "step": [n for n in range(4) for _ in range(4)],
            "tokens": [10, 80] * 8,
            "state": ["kept"] * 16,
        }
    ).write_parquet(folder / "samples" / "step-000000.parquet", mkdir=True)
    text = "\n".join(map(json.dumps, lines)) + "\n"
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    ends = [{"eval/sampled_accuracy": accuracies[0]}, {"eval/sampled_accuracy": accuracies[2]}]
    summary = {"before": ends[0], "after": ends[1], "num_tokens": 4 * tokens}
    summary |= {"kept_tokens": 3 * tokens}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def test_differences_are_to_plain_rounds_at_equal_prompts_tokens_and_iterations(
    tmp_path: Path,
) -> None:
    rows = []
    for seed, lift in enumerate([0.0, 0.1]):
        ends = {"off": (0.6, 100, 50), "exact": (0.7, 100, 50), "race": (0.5, 80, 20)}
        for arm, (end, tokens, steps) in ends.items():
            folder = made(tmp_path / f"{arm}{seed}", [0.2, 0.4 + lift, end + lift], tokens, steps)
            about = {"task": "gcd", "rate": 1e-3, "seed": seed, "arm": arm}
            rows += [about | row for row in curve(folder)]
    low = {"task": "gcd", "rate": 1e-3, "seed": 0, "arm": "prompts"}
    rows += [low | row for row in curve(made(tmp_path / "low", [0.2, 0.1, 0.1], 100, 50))]
    planned = [{"task": "gcd", "rate": 1e-3, "arm": row["arm"]} for row in rows if row["step"] == 0]
    text = tables(rows, [*planned, planned[-1]])
    assert "### gcd, learning rate 0.001" in text
    learned, happened = (part.splitlines()[2:] for part in text.split("\n\n")[1:3])
    found = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in learned}
    off, exact, race = found["off"], found["exact"], found["race"]
    assert off[3] == "0.650 (0.60 to 0.70)"
    assert off[4] == ""
    # Of ten tenths, five lie on the way from .2 to .4 and five on that to .6.
    tenths = [0.24, 0.28, 0.32, 0.36, 0.4, 0.44, 0.48, 0.52, 0.56, 0.6]
    assert off[1].split()[1:] == [f"({statistics.fmean(tenths):.2f}", "to", "0.50)"]
    assert exact[4].startswith("+0.100")
    assert found["prompts"][0] == "1 of 2, 1 collapsed"
    # At equal prompts 0.15 less than both; at 320 tokens they have come 60% of the way from 0.4,
    # at 80 iterations 80% of that from 0.2.
    assert race[4].startswith("-0.150 ± ")
    plain = 0.45 + 0.6 * (0.7 - 0.45)
    assert float(race[5].split()[0]) == pytest.approx(0.55 - plain, abs=2e-3)
    assert float(race[6].split()[0]) == pytest.approx(0.55 - (0.2 + 0.8 * 0.25), abs=2e-3)
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in happened}["race"]
    assert cells[0] == "8"
    assert cells[8:11] == ["0.40", "4", "1.33"]
    drawn = picture(comparisons(rows))
    # 0.12 on average, less 0.42 and 0.45 of the plain runs of its seed.
    assert ">← -0.3" in drawn
    assert drawn.count("<circle") == 2, "of exact and race; prompts is too far away"


def test_pages_and_picture_say_what_the_rows_do(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for run in kept(study_run.RESULTS).values() for row in run]
    planned = study_run.trials(STUDY, list(STUDY["tasks"]), None, {})
    made = study_run.pages(rows, [trial.about for trial in planned])
    assert {path.name for path in made} == {"README.md", "concepts.md", "plot.svg"}
    assert len(made) == 4
    study_run.check(made)
    other = {path: text.replace("0.0095", "0.0094") for path, text in made.items()}
    with pytest.raises(SystemExit, match=r"README.md, docs/concepts.md.*--page"):
        study_run.check(other)


def run_of(accuracy: float) -> list[dict[str, float]]:
    return [{"accuracy": accuracy, "tokens": 1, "iterations": 1}]


def test_two_plain_runs_of_a_seed_are_one() -> None:
    ours = {0: run_of(0.5), 1: run_of(0.6)}
    off = {0: run_of(0.4), 1: run_of(0.6)}
    alone, twice = (difference(ours, base, last) for base in ([off], [off, off]))
    assert alone == twice
    assert alone is not None
    assert alone.error == pytest.approx(((0.1**2 + 0.2**2) / 2 / 2) ** 0.5)
    exact = {0: run_of(0.5), 1: run_of(0.6)}
    found = difference({0: run_of(0.5)}, [off, exact], last)
    assert found is not None
    assert found.mean == pytest.approx(0.05)


def test_tasks_are_pooled_by_their_inverse_variances() -> None:
    both = pooled([Difference(0.1, 0.02, 0.01), Difference(0.6, 0.04, 0.02)])
    assert both.mean == pytest.approx(0.8 * 0.1 + 0.2 * 0.6)
    assert both.error == pytest.approx(0.2**0.5 * 0.02)
    assert both.half == pytest.approx(1.96 * both.error, rel=1e-3)


def test_a_run_that_stopped_by_itself_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    assert curve(folder) == []
    folder.mkdir()
    (folder / "summary.json").write_text('{"before": {}, "interrupted": true}', encoding="utf-8")
    assert curve(folder) == []
    (folder / "failed.txt").write_text("no", encoding="utf-8")
    assert curve(folder) == [{"step": None}]
