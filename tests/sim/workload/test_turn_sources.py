"""Where a simulated response's turns come from: a trace, or a model of turns."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.polytrace import formats
from rollpacker.polytrace.model.turns import Scale, TraceResponse
from rollpacker.polytrace.model.turns import TraceTurn as Recorded
from rollpacker.polytrace.model.workload import generate, load_model
from rollpacker.polytrace.schema import Trace
from rollpacker.sim import estimate as est
from rollpacker.sim.costs import calibration
from rollpacker.sim.workload.source import of_model, of_trace
from rollpacker.sim.workload.workload import ScriptedTurn, at_most, recorded_turns
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation
from rollpacker.trace_replay.plan import plan
from rollpacker.trace_replay.simulated import replay, replay_costs


def test_recorded_turns_say_what_tools_put_in() -> None:
    response = TraceResponse(
        turns=(
            Recorded(prompt=100, tokens=20, tool_s=1.0),
            Recorded(prompt=150, tokens=0, tool_s=2.0),
            Recorded(prompt=155, tokens=7, tool_s=3.0),
        )
    )
    turns = recorded_turns(response)
    assert turns == (ScriptedTurn(20, 3.0, 35), ScriptedTurn(7))
    assert at_most(turns, 100) == turns
    assert at_most(turns, 22) == (ScriptedTurn(20, 3.0, 35), ScriptedTurn(2))
    assert at_most(turns, 20) == (ScriptedTurn(20),)
    assert at_most(turns, 5) == (ScriptedTurn(5),)
    assert recorded_turns(TraceResponse(turns=(Recorded(prompt=9, tokens=0),))) == (
        ScriptedTurn(1),
    )


@given(st.integers(0, 99))
@settings(max_examples=settings().max_examples // 10)
def test_drawn_turns_sum_to_the_length(seed: int) -> None:
    model = load_model("search")
    assert model.turns is not None
    lengths = np.random.default_rng(seed).integers(1, 2000, 50)
    prompts = np.full(50, 200)
    responses = model.turns.responses(np.random.default_rng(seed), prompts, lengths)
    assert [response.tokens for response in responses] == lengths.tolist()
    again = model.turns.sample(np.random.default_rng(seed), prompts, lengths)[0]
    contexts = [[turn["prompt_tokens"] for turn in turns] for turns in again]
    assert [[turn.prompt for turn in response.turns] for response in responses] == contexts


def search_config(**keys) -> SimulationConfig:
    return SimulationConfig.model_validate(
        {
            "calibration": "paper-7b-8k",
            "workload": "search",
            "steps": 2,
            "gpus": 8,
            "rollout": {"prompts_per_step": 16, "num_generations": 8},
            **keys,
        }
    )


def test_a_model_with_tools_takes_their_time() -> None:
    costs = calibration.load("paper-7b-8k")
    found = Simulation(search_config(), costs, of_model("search")).run()
    assert found.tool_bound_s > 0.0
    assert all(step.rollout_s > step.longest_tool_s for step in found.steps)
    again = Simulation(search_config(tool_kv="dropped"), costs, of_model("search")).run()
    assert again.mean_step_s > found.mean_step_s


def check_trace(trace: Trace) -> None:
    """Recorded turns come first; estimate and replay take them."""
    task = trace.tasks[0]
    source = of_trace(trace)
    assert source.prompts is not None
    assert source.responses is not None
    assert [sum(turn.tokens for turn in turns) for r in source.recorded for turns in r.turns] == [
        n for r in source.recorded for n in r.lengths.tolist()
    ]
    (step,) = plan(trace, task, steps=1, scale=Scale(), note=lambda _: None)
    costs = replay_costs([step], None)
    row = replay(step, costs, gpus=4, concurrency=64, seed=0)
    longest = max(sum(t.tool_s for t in r.turns[:-1]) for r in step.responses)
    assert row["rollout_s"] > longest
    assert 0.0 <= row["tool_wait_s"] < row["rollout_s"]
    assert row["turns"] == len(step.turns)
    job = est.on_paper_gpus(task, source)
    found = est.estimate(job, trace, steps=2)
    assert found.modes["off"].speedup == 1.0
    assert found.modes["off"].tool_wait_s >= 0.0


def test_a_trace_with_tools_is_estimated_and_replayed() -> None:
    check_trace(generate(load_model("search"), steps=2, prompts=8, responses=4))


@pytest.mark.skipif("ROLLPACKER_POLYTRACE" not in os.environ, reason="needs public traces")
def test_a_public_trace_with_tools_is_estimated_and_replayed() -> None:
    check_trace(formats.read(Path(os.environ["ROLLPACKER_POLYTRACE"]) / "search_r1_7b"))
