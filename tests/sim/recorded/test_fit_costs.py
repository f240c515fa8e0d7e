"""Calibration from a run: simulated runs with known costs give these costs back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollpacker import config
from rollpacker.core.journal import JournalWriter
from rollpacker.sim.costs import calibration
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import Ahead, Rule, ahead_terms
from rollpacker.sim.recorded import fit_costs, rerun
from rollpacker.sim.recorded.run_record import RunRecord, read_run
from rollpacker.sim.workload.source import LengthSource, of_model
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation

TRUTH: dict[str, Any] = {
    "name": "made",
    "device": "cpu",
    "model": "made",
    "gpus": 2,
    "response_cap": 8192,
    "prompt_tokens": 10,
    "train_launch_s": 1e-3,
    "apply_s": 5e-3,
    "rollout_start_s": 0.02,
    "weight_sync_s": 0.0,
    "rewards": {"math_s": 2e-3},
    "measured": {
        "latency": {1: 1e-3, 4: 1.2e-3, 16: 2e-3, 64: 6e-3},
        "kv_tokens": 1 << 30,
        "prefill_token_s": 3e-5,
        "context_token_s": 1e-8,
        "train_token_s": 1e-4,
        "train_square_s": 1e-9,
        "train_task_s": 2e-3,
    },
    "fitted": {},
}


RULE = Rule(below=16, most=7, free=8, row_cost=0.1, ahead=Ahead(tokens=3.0, drafted=7))


def decoded(truth: Calibration, step: int, ahead: Sequence[bool] = (False,)) -> list[list[float]]:
    """What the workers of a step say of decoding: some steps of each number of sequences."""
    rng, costs, found = np.random.default_rng(step), truth.engine(), []
    for most in (1, 2, 4, 8, 16, 32, 64, 64):
        batch = int(rng.integers(most // 2 + 1, most + 1))
        tokens, ended = int(rng.integers(20, 200)), int(rng.integers(0, 9))
        context = batch * rng.uniform(50.0, 2000.0)
        for drafts in ahead:
            second_s, slope = costs.step_s(batch, 0.0), costs.slope
            if drafts:
                second_s, slope = ahead_terms(costs, batch, RULE)
            prefill = int(rng.integers(0, 2) * rng.integers(1, 500))
            seconds = tokens * (second_s + slope * context) + costs.prefill_s(prefill)
            if truth.driver is not None:
                seconds += ended * truth.gpus / truth.driver.cores * handled_s(truth)
            sums = (tokens, tokens * batch, tokens * context, prefill, ended, seconds)
            found.append([float(drafts), *sums])
    return found


def handled_s(truth: Calibration) -> float:
    """Of the driver for a response that ends, and is graded beside others."""
    return 0.0 if truth.driver is None else truth.driver.ended_s + truth.driver.graded_s


def metrics_of(results: Sequence[Any], truth: Calibration, ahead: Sequence[bool]) -> str:
    lines = [
        {
            "step": result.step,
            "step_time": result.step_s,
            "timing_s/rollout": result.step_s - result.train_s,
            "timing_s/train": result.train_s,
            "engine/step_times": decoded(truth, result.step, ahead),
        }
        for result in results
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def made_run(
    folder: Path,
    mode: str,
    steps: int = 12,
    driver: dict[str, Any] | None = None,
    ahead: dict[str, Any] | None = None,
) -> RunRecord:
    """The folder of a simulated run, as a real one leaves it; with a ``driver`` on its cores, and
    engines that decode ``ahead``."""
    folder.mkdir(exist_ok=True)
    if driver is not None:
        timing_s = {"worker_cpu": 1.0, "decode_cpu": 1.0, "driver_cpu": 1.0}
        cores = {"all": driver["cores"], "workers": driver["cores"]}
        summary = {"steps": steps, "decoded_tokens": 1, "timing_s": timing_s, "cores": cores}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    source: LengthSource = of_model("paper-8k")
    settings = config.parse_as(
        SimulationConfig,
        {
            "calibration": "made",
            "workload": "paper-8k",
            "steps": steps,
            "rollout": {
                "prompts_per_step": 16,
                "num_generations": 4,
                "tail_batching": {"mode": mode},
            },
            "domains": {"default": {"reward": "math"}},
        },
    )
    writer = JournalWriter(folder / "journal.jsonl")
    truth = Calibration.model_validate(TRUTH | {"driver": driver, "ahead": ahead or {}})
    simulation = Simulation(settings, truth, source, record=writer.record)
    writer.meta(simulation.policy.journal_head())
    results = simulation.run().steps
    writer.close()
    text = metrics_of(results, truth, (False, True) if ahead else (False,))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return read_run(folder)


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_known_costs_come_back(tmp_path: Path, mode: str) -> None:
    run = made_run(tmp_path, mode)
    found = fit_costs.calibrate(run)
    assert found.measured is not None
    truth = Calibration.model_validate(TRUTH)
    ours, theirs = found.engine(), truth.engine()
    for batch in (1, 4, 16):
        context = batch * 600.0
        assert ours.step_s(batch, context) == pytest.approx(theirs.step_s(batch, context), rel=0.05)
    for tokens in (200, 1000, 4000):
        assert found.training().sequence_s(tokens) == pytest.approx(
            truth.training().sequence_s(tokens), rel=0.05
        )
    assert found.apply_s == pytest.approx(5e-3, rel=0.01)
    assert found.measured.prefill_token_s == pytest.approx(3e-5, rel=0.05)
    # A simulated step is journaled from the end of its start on.
    assert (found.rollout_start_s, found.weight_sync_s) == (0.0, pytest.approx(0.02, abs=1e-3))
    if mode == "exact":
        assert found.rewards.math_s == pytest.approx(2e-3, rel=0.01)


def test_a_rollouts_start_is_without_the_time_in_which_environments_begin(tmp_path: Path) -> None:
    run = made_run(tmp_path, "off", steps=3)
    for step in run.steps:
        step.start_s = 0.5
    assert fit_costs.calibrate(run).rollout_start_s == pytest.approx(0.5)
    for attempt in run.steps[1].attempts:
        attempt.opening_s = 0.2
    assert fit_costs.calibrate(run).rollout_start_s == pytest.approx((0.3 + 0.5) / 2)


def test_an_update_does_not_begin_before_the_rollouts_end(tmp_path: Path) -> None:
    """Though the last gradient may be there long before: the last group need not be trained on."""
    run = made_run(tmp_path, "exact")
    for step in run.steps:
        step.last_gradient_s = step.told.start_s
    found = fit_costs.calibrate(run)
    rest = [step.end_s - step.rollout_end_s for step in fit_costs.timed(run) if step.end_s]
    assert found.apply_s == pytest.approx(sum(rest) / len(rest))


@pytest.mark.parametrize("mode", ["off", "exact", "race"])
def test_steps_that_were_held_back_are_predicted(tmp_path: Path, mode: str) -> None:
    found = rerun.held_back(made_run(tmp_path, mode))
    assert found.accuracy_mean > 0.97
    assert found.total > 0.98
    assert set(found.phases) == {"rollout", "train"}


AHEAD = {"tokens": 3.0, "drafted": 7}


def test_what_drafts_save_is_told_from_what_a_step_costs(tmp_path: Path) -> None:
    """A mode that drafts nothing is not made faster by them."""
    found = fit_costs.calibrate(made_run(tmp_path, "exact", ahead=AHEAD))
    assert found.ahead.acceptance == pytest.approx(Ahead(**AHEAD).acceptance, rel=0.1)
    assert 2 < found.ahead.drafted <= 7
    truth = Calibration.model_validate(TRUTH)
    for batch in (1, 2, 4, 8, 16, 32):
        assert found.engine().step_s(batch, 0.0) == pytest.approx(
            truth.engine().step_s(batch, 0.0), rel=0.1
        )
    assert found.ahead.measured[1] < 0.7 * found.engine().step_s(1, 0.0)


def test_a_run_that_drafts_from_its_start_has_the_curve_it_was_told(tmp_path: Path) -> None:
    run = made_run(tmp_path, "exact", steps=4, ahead=AHEAD)
    for step in run.steps:
        step.times[:] = [[1.0, *sums] for _, *sums in step.times]
    found = fit_costs.calibrate(run)
    assert found.measured is not None
    told = {int(batch): s for batch, s in run.settings["latency"].items()}
    assert found.measured.latency == told
    assert found.ahead.measured
    assert "ahead" in found.fitted


def test_runs_that_drafted_are_predicted_too(tmp_path: Path) -> None:
    found = rerun.held_back(made_run(tmp_path, "exact", ahead=AHEAD))
    assert found.accuracy_mean > 0.95
    assert found.total > 0.95


def test_a_rerun_takes_the_runs_own_prompts_lengths_and_rewards(tmp_path: Path) -> None:
    run = made_run(tmp_path, "exact")
    again = rerun.rerun(run, Calibration.model_validate(TRUTH))
    measured = [step.measured["step"] for step in run.steps]
    assert [step.step_s for step in again] == pytest.approx(measured, rel=1e-3)


def test_groups_without_variance_of_rewards_cost_no_gradient(tmp_path: Path) -> None:
    run = made_run(tmp_path, "off", steps=4)
    truth = Calibration.model_validate(TRUTH)
    before = rerun.rerun(run, truth)[1].train_s
    for attempt in run.steps[1].attempts:
        attempt.reward = 1.0
    after = rerun.rerun(run, truth)[1].train_s
    assert after < 0.1 * before


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    found = fit_costs.calibrate(made_run(tmp_path, "exact"))
    calibration.dump(found, tmp_path / "costs.yaml")
    assert calibration.load(tmp_path / "costs.yaml") == found


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run's folder"):
        read_run(tmp_path)


def test_a_run_that_timed_too_little_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path, "exact", steps=1)
    del run.steps[0].times[1:]
    with pytest.raises(ValueError, match="too few"):
        fit_costs.calibrate(run)


def test_a_run_whose_workers_told_no_times_is_to_be_run_again(tmp_path: Path) -> None:
    run = made_run(tmp_path, "exact", steps=2)
    for step in run.steps:
        step.times.clear()
    with pytest.raises(ValueError, match=r"engine/step_times.*run it again"):
        fit_costs.calibrate(run)
