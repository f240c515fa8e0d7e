"""``estimate`` of an emulated run has the machine that it names."""

from pathlib import Path

import yaml
from emulated_jobs import job

from rollpacker.emulate.twin import estimated
from rollpacker.sim.workload.source import load_source


def test_an_estimate_has_the_machine_that_the_run_emulated(tmp_path: Path) -> None:
    """Its rewards too, which take time in ``off`` alone."""
    source, run = load_source("paper-8k"), tmp_path / "run"
    run.mkdir()
    tree = job(tmp_path, "off").model_dump(mode="json")
    (run / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = estimated(run, source, "off")
    assert found is not None
    (case,) = found.cases
    costs = case.calibration
    assert (costs.name, costs.rollout_tp, case.gpus) == ("paper-14b-16k", 2, 8)
    assert found.graded
    assert costs.synchronous_reward_s == 44.0
    assert not found.texts
    (run / "config.yaml").write_text("{}\n", encoding="utf-8")
    assert estimated(run, source, "off") is None


def test_the_baseline_grades_when_the_run_of_off_did(tmp_path: Path) -> None:
    source, run = load_source("paper-8k"), tmp_path / "run"
    run.mkdir()
    for mode, early in (("off", True), ("off", None), ("exact", True)):
        tree = job(tmp_path, mode).model_dump(mode="json")
        tree["grading"]["asynchronous"] = early
        (run / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        found = estimated(run, source, mode)
        assert found is not None
        assert found.early == (early if mode == "off" else None)
