"""The study of accuracy by mode: its runs are valid, and its tables pair what belongs together."""

import dataclasses
import importlib.util
import json
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
from accuracy_tables import curve, kept, key_of, tables  # noqa: E402

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
        assert config.eval.every * 4 <= (config.steps or 0)
        kinds.add((trial.task, trial.rate, json.dumps(config.rollout.model_dump(mode="json"))))
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
    assert "no task gdc: choose from gcd, chance, tools, sums" in capsys.readouterr().err


def test_rows_of_earlier_runs_stand_for_their_folders_until_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(study_run, "HERE", tmp_path)
    monkeypatch.setattr(study_run, "RESULTS", tmp_path / "results.parquet")
    (tmp_path / "README.md").write_text(
        "words\n<!-- tables -->\nthe ones before\n", encoding="utf-8"
    )
    trial = FIRST[0]
    made(trial.folder(tmp_path / "out"), [0.2, 0.4, 0.6], 100, 50)
    study_run.write([trial], {}, tmp_path / "out")
    rows = kept(tmp_path / "results.parquet")
    assert key_of(trial.about) in rows

    study_run.write([trial], rows, tmp_path / "nothing here")
    assert kept(tmp_path / "results.parquet") == rows
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.startswith("words\n")
    assert "| off | 1 | 0.600" in page
    assert "the ones before" not in page

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
            "step_time": 1.0,
            "num_tokens": tokens * (n + 1),
            "policy_version_max_lag": n % 2,
            "tail/kept_vs_true_len": 1.0,
        }
        for n in range(4)
    ]
    lines[1]["eval/sampled_accuracy"] = accuracies[1]
    text = "\n".join(map(json.dumps, lines)) + "\n"
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    ends = [{"eval/sampled_accuracy": accuracies[0]}, {"eval/sampled_accuracy": accuracies[2]}]
    summary = {"before": ends[0], "after": ends[1], "num_tokens": 4 * tokens}
    summary |= {"kept_tokens": 3 * tokens}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def test_differences_are_paired_by_seed_at_equal_prompts_tokens_and_steps(tmp_path: Path) -> None:
    rows = []
    for seed, lift in enumerate([0.0, 0.1]):
        runs = {
            "off": made(tmp_path / f"off{seed}", [0.2, 0.4 + lift, 0.6 + lift], 100, 50),
            "race": made(tmp_path / f"race{seed}", [0.2, 0.4 + lift, 0.5 + lift], 80, 20),
        }
        for arm, folder in runs.items():
            about = {"task": "gcd", "rate": 1e-3, "seed": seed, "arm": arm}
            rows += [about | row for row in curve(folder)]
    text = tables(rows, tmp_path / "rows.parquet")
    assert len(pl.read_parquet(tmp_path / "rows.parquet")) == len(rows) == 4 * 3
    assert "### gcd, learning rate 0.001" in text
    off, race = (
        line.split(" | ") for line in text.splitlines() if line.startswith(("| off", "| race"))
    )
    assert off[2] == "0.650 (0.60 to 0.70)"
    # At equal prompts 0.1 less; at 320 tokens off has come 60% of the way from 0.4 to 0.6; at 80
    # decode steps it has come 80% of the way from 0.2.
    assert race[3] == "-0.100 ± 0.000"
    assert race[4].startswith("-0.020")
    assert float(race[5].split()[0]) == pytest.approx(0.55 - (0.2 + 0.8 * 0.25), abs=2e-3)
    assert race[-2] == "0.40"
    assert race[-1].startswith("1.33")


def test_a_run_that_stopped_by_itself_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    assert curve(folder) == []
    folder.mkdir()
    (folder / "summary.json").write_text('{"before": {}, "interrupted": true}', encoding="utf-8")
    assert curve(folder) == []
    (folder / "failed.txt").write_text("no", encoding="utf-8")
    assert curve(folder) == [{"step": None}]
