"""Devices that only decode and devices that only train: when gradients run, and what is idle."""

import re

import pytest
from pydantic import ValidationError
from test_simulator import Journal, simulation
from test_turns import Flat, Scripted

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core import journal
from rollpacker.policy.engines.fleet import grid, separate
from rollpacker.policy.rollout import RolloutPolicy, from_journal
from rollpacker.policy.settings import RolloutSettings
from rollpacker.sim.costs.costs import TrainCosts
from rollpacker.sim.workload.workload import ScriptedTurn
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.world import World

SPLIT = {"layout": "separate", "training_gpus": 4, "gpus": 16}


class Step:
    """What gradients of one step did, and when."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.decoding: list[set[int]] = []
        """Engines that decode whenever gradients are asked for."""
        self.seconds = 0.0
        self.rollout_over = 0.0
        self.kinds: set[type] = set()


def steps_of(lines) -> list[Step]:
    steps: list[Step] = []
    running: dict[int, int] = {}
    for now, event, made in lines:
        if isinstance(event, ev.StepStarted):
            steps.append(Step())
            running = {}
        if isinstance(event, ev.AttemptFinished | ev.AttemptAborted):
            running.pop(event.attempt, None)
        if isinstance(event, ev.GradientsAccumulated):
            steps[-1].seconds += event.seconds
        for decision in made:
            steps[-1].kinds.add(type(decision))
            match decision:
                case do.StartAttempt():
                    running[decision.attempt] = decision.engine
                case do.AccumulateGradients():
                    steps[-1].asked.append(now)
                    steps[-1].decoding.append(set(running.values()))
                case do.FinishRollout():
                    steps[-1].rollout_over = now
                case _:
                    pass
    return steps


def run(mode: str, **changes):
    lines = Journal()
    result = simulation(mode, lines, prompts=32, steps=3, **changes).run()
    return result, steps_of(lines.lines)


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_gradients_begin_while_all_engines_decode(mode: str) -> None:
    _, steps = run(mode, **SPLIT)
    for step in steps:
        assert step.asked[0] < step.rollout_over
        assert not {do.MigrateAttempts, do.OfferTail, do.FormEngine} & step.kinds
    assert steps[0].decoding[0] == set(range(12))


def test_without_streaming_gradients_begin_after_the_rollout() -> None:
    result, steps = run("off", **SPLIT)
    assert all(step.asked[0] >= step.rollout_over for step in steps)
    assert result.steps[0].train_s > run("exact", **SPLIT)[0].steps[0].train_s


def test_the_gradient_work_is_that_of_colocated_devices() -> None:
    """The same groups on replicas of the same size; only the moment differs."""
    _, apart = run("exact", **SPLIT)
    _, together = run("exact", gpus=16)
    for one, two in zip(apart, together, strict=True):
        assert one.seconds == pytest.approx(two.seconds, abs=1e-3)


@pytest.mark.parametrize("changes", [{}, {"rollout": {"planner": "paper"}}])
@pytest.mark.parametrize("mode", ["off", "exact", "auto"])
def test_its_journal_replays(tmp_path, mode: str, changes) -> None:
    path = tmp_path / "journal.jsonl"
    writer = journal.JournalWriter(path)
    job = simulation(mode, writer.record, steps=3, **SPLIT, **changes)
    writer.meta(job.policy.journal_head())
    job.run()
    writer.close()
    replay = journal.replay(path, from_journal)
    assert replay.differences == []
    assert replay.events > 100


def test_a_step_by_hand() -> None:
    """Two engines decode 10 and 30 steps after a prompt of 1 s; one replica of two devices trains
    for 110 s and 130 s, all of it after the only group is complete."""
    rollout = RolloutConfig.model_validate(
        {"prompts_per_step": 1, "num_generations": 2, "tail_batching": {"mode": "exact"}}
    )
    settings = RolloutSettings.of(
        rollout,
        seed=0,
        sizes={"default": 1},
        cap=1000,
        latency={1: 1.0},
        engines=2,
        whole_batch=False,
        layout="separate",
    )
    devices = grid(4, 4)
    costs = WorldCosts(
        fleet=separate(devices[:2], devices[2:], tensor_parallel=1, replica=2),
        engine=lambda _devices: Flat(),
        train=TrainCosts(0.0, 1.0, prompt_tokens=100),
    )
    world = World(
        RolloutPolicy(settings), Scripted([(ScriptedTurn(10),), (ScriptedTurn(30),)]), costs
    )
    step = world.run_step(0)
    assert step.rollout_s == pytest.approx(1.0 + 30.0, abs=0.1)
    assert step.train_s == pytest.approx(110.0 + 130.0, abs=0.1)
    decoding, training = 2 * 1.0 + 10.0 + 30.0, 2 * (110.0 + 130.0)
    assert step.bubble == pytest.approx(1.0 - (decoding + training) / (4 * step.step_s), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "separate"}, "separate needs training_gpus"),
        ({"training_gpus": 4}, "with layout: colocated all gpus train"),
        (SPLIT | {"training_gpus": 16}, "training_gpus=16 of gpus=16 leaves none for rollout"),
        (SPLIT | {"training_gpus": 5, "rollout_tp": 2}, "11 into engines of 2: change"),
        (
            SPLIT | {"calibration": "paper-14b-16k", "training_gpus": 6},
            "6 must divide into training replicas of 4 GPUs",
        ),
    ],
)
def test_an_impossible_split_is_one_line(changes, message: str) -> None:
    with pytest.raises((ValueError, ValidationError), match=re.escape(message)):
        simulation("exact", **changes)
