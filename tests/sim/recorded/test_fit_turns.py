"""Calibration from a run with an environment: its costs come back, and its steps are predicted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fit_costs import TRUTH, metrics_of

from rollpacker import config
from rollpacker.core.journal import JournalWriter
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.recorded import fit_costs, rerun
from rollpacker.sim.recorded.run_record import RunRecord, read_run
from rollpacker.sim.workload.source import LengthSource, of_model
from rollpacker.sim.workload.workload import Recorded, ScriptedTurn, Turns
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation

PROMPTS, RESPONSES = 16, 4
TURNS: dict[str, Any] = TRUTH | {"measured": TRUTH["measured"] | {"context_token_s": 1e-7}}


def episode(rng: np.random.Generator) -> Turns:
    """An environment that begins, answers with tokens, and hears of the end."""
    count = int(rng.integers(1, 5))
    tokens = rng.integers(10, 300, count).tolist()
    waits = rng.exponential(0.05, count).tolist()
    added = [*rng.integers(5, 60, count - 1).tolist(), 0]
    return (
        ScriptedTurn(0, float(rng.uniform(0.0, 0.02))),
        *map(ScriptedTurn, tokens, waits, added),
    )


def episodes(steps: int) -> LengthSource:
    rng = np.random.default_rng(3)
    model = of_model("paper-8k")
    recorded: list[Recorded] = []
    for _ in range(2 * PROMPTS * steps):
        turns = tuple(episode(rng) for _ in range(2 * RESPONSES))
        lengths = np.array([sum(turn.tokens for turn in each) for each in turns], np.int32)
        traits = model.lengths.traits(rng, 1)
        recorded.append(Recorded(traits, lengths, turns=turns))
    return LengthSource(lengths=model.lengths, recorded=tuple(recorded), cap=2000)


def made_run(folder: Path, mode: str, steps: int = 12) -> RunRecord:
    """The folder of a simulated run with an environment, as a real one leaves it."""
    settings = config.parse_as(
        SimulationConfig,
        {
            "calibration": "made",
            "workload": "made",
            "steps": steps,
            "rollout": {
                "prompts_per_step": PROMPTS,
                "num_generations": RESPONSES,
                "tail_batching": {"mode": mode},
            },
            "domains": {"default": {"reward": "math"}},
        },
    )
    writer = JournalWriter(folder / "journal.jsonl")
    truth = Calibration.model_validate(TURNS)
    simulation = Simulation(settings, truth, episodes(steps), record=writer.record)
    writer.meta(simulation.policy.journal_head())
    text = metrics_of(simulation.run().steps, truth, (False,))
    writer.close()
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return read_run(folder)


@pytest.fixture(scope="module", params=["off", "exact"])
def run(request, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return made_run(tmp_path_factory.mktemp("run"), request.param)


def test_turns_are_read_as_they_were(run: RunRecord) -> None:
    """Times were rounded to microseconds."""
    made = episodes(12).recorded
    ended = [each for step in run.steps for each in step.finished]
    assert len(ended) >= 12 * PROMPTS * RESPONSES
    for attempt in ended:
        wanted = made[int(attempt.prompt[1:])].turns[attempt.index]
        turns = rerun.tried(attempt, acts=True).turns
        assert [(t.tokens, t.added) for t in turns] == [(t.tokens, t.added) for t in wanted]
        waits = [turn.tool_s for turn in wanted]
        assert [turn.tool_s for turn in turns] == pytest.approx(waits, abs=3e-6)


def test_known_costs_come_back(run: RunRecord) -> None:
    found, truth = fit_costs.calibrate(run), Calibration.model_validate(TURNS)
    for batch in (1, 4, 16):
        ours, theirs = (each.engine().step_s(batch, batch * 400.0) for each in (found, truth))
        assert ours == pytest.approx(theirs, rel=0.1)
    assert found.measured is not None
    assert found.measured.prefill_token_s == pytest.approx(3e-5, rel=0.05)
    assert found.training().sequence_s(1000) == pytest.approx(
        truth.training().sequence_s(1000), rel=0.05
    )


def test_steps_that_were_held_back_are_predicted(run: RunRecord) -> None:
    found = rerun.held_back(run)
    assert found.accuracy_mean > 0.97
    assert found.total > 0.97


def test_a_rerun_with_the_true_costs_takes_the_same_time(run: RunRecord) -> None:
    again = rerun.rerun(run, Calibration.model_validate(TURNS))
    measured = [step.measured["step"] for step in run.steps]
    assert [step.step_s for step in again] == pytest.approx(measured, rel=1e-3)
