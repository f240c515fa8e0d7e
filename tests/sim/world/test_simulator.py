"""Whole simulated jobs at the paper's settings: determinism, work, memory, bounds."""

import functools
import tracemalloc
from collections import Counter

import pytest

from rollpacker.config.rollout import USED_IN, TailBatchingConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import RoundKind
from rollpacker.job.plan.checks import check_used
from rollpacker.sim.costs import calibration
from rollpacker.sim.workload.source import load_source
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation
from rollpacker.sim.world.step import JobResult

MODES = ("off", "exact", "race", "prompts", "partial", "auto")


def simulation(mode: str, record=None, *, steps: int = 6, prompts: int = 16, **changes):
    rollout = {
        "prompts_per_step": prompts,
        "num_generations": 8,
        "tail_batching": {"mode": mode},
        "streaming": {"group_tokens": 16384},
    }
    given = {
        "calibration": "paper-7b-8k",
        "workload": "paper-8k",
        "steps": steps,
        "rollout": rollout | changes.pop("rollout", {}),
    }
    config = SimulationConfig.model_validate(given | changes)
    return Simulation(
        config, calibration.load(config.calibration), load_source(config.workload), record
    )


class Journal:
    def __init__(self) -> None:
        self.lines: list[tuple] = []

    def __call__(self, now, event, made) -> None:
        self.lines.append((now, event, list(made)))

    def kinds(self) -> Counter:
        return Counter(type(event) for _, event, _ in self.lines)

    def lengths(self) -> dict[tuple[str, int], int]:
        """Of whole responses of first visits, by prompt and sample index."""
        places, lengths, visits = {}, {}, {}
        step = -1
        for _, event, made in self.lines:
            step += isinstance(event, ev.StepStarted)
            if isinstance(event, ev.AttemptFinished):
                place = places[event.attempt]
                if visits[place[0]] == step:
                    lengths[place] = event.tokens
            for each in made:
                if isinstance(each, do.StartAttempt):
                    places[each.attempt] = (each.prompt, each.index)
                    visits.setdefault(each.prompt, step)
        return lengths


@functools.cache
def usual(mode: str) -> tuple[JobResult, Journal]:
    """The usual job in a mode, and its journal."""
    journal = Journal()
    return simulation(mode, journal).run(), journal


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_job(mode: str) -> None:
    one, _ = usual(mode)
    assert simulation(mode).run() == one
    assert simulation(mode, seed=1).run() != one


CHANGED = {
    "eta_prompts": 2.0,
    "eta_responses": 2.0,
    "long_round_steps": 2,
    "max_staleness": 1,
    "stale_tokens": "mask",
    "bias_limit": 0.5,
    "race_responses": True,
    "audit_every": 2,
    "audit_prompts": 8,
}


@pytest.mark.parametrize("mode", MODES)
def test_options_of_other_modes_change_nothing_and_a_run_says_so(mode: str) -> None:
    assert CHANGED.keys() == USED_IN.keys()
    assert USED_IN.keys() | {"mode"} == TailBatchingConfig.model_fields.keys()
    unused = {key: value for key, value in CHANGED.items() if mode not in USED_IN[key]}
    journal = Journal()
    changed = simulation(mode, journal, rollout={"tail_batching": {"mode": mode, **unused}}).run()
    one, lines = usual(mode)
    assert (changed, journal.lines) == (one, lines.lines)
    said = check_used(TailBatchingConfig.model_validate({"mode": mode, **CHANGED}))
    assert [line.partition("=")[0].rpartition(".")[2] for line in said] == list(unused)
    assert not check_used(TailBatchingConfig.model_validate({"mode": mode}))


def test_all_modes_see_the_same_lengths_of_first_visits() -> None:
    seen = {mode: usual(mode)[1].lengths() for mode in MODES}
    for mode in MODES[1:]:
        common = seen["off"].keys() & seen[mode].keys()
        assert len(common) > 300
        assert all(seen["off"][place] == seen[mode][place] for place in common)


@pytest.mark.parametrize("mode", MODES)
def test_bounds(mode: str) -> None:
    result, _ = usual(mode)
    assert all(0.0 <= step.bubble <= 1.0 for step in result.steps)
    assert all(step.step_s >= result.packing_s * 0.5 for step in result.steps)
    assert all(step.samples == 16 * 8 for step in result.steps)
    capped = [step for step in result.of(RoundKind.FULL) if step.kept_tokens]
    assert all(step.rollout_s > 0 and step.train_s > 0 for step in capped)


def test_what_the_modes_do_to_a_job() -> None:
    off, exact, race = (simulation(m, steps=8, prompts=32).run() for m in ("off", "exact", "race"))
    assert exact.kept_vs_true_len == pytest.approx(off.kept_vs_true_len)
    assert exact.mean_step_s < off.mean_step_s
    assert race.mean_step_s < off.mean_step_s
    assert race.kept_vs_true_len < 0.9
    assert exact.bubble < off.bubble


@pytest.mark.parametrize("scaling", ["consolidate", "paper", "fixed"])
@pytest.mark.parametrize("planner", ["off", "paper"])
def test_engines_that_change_their_size(scaling: str, planner: str) -> None:
    journal = Journal()
    rollout = {
        "tail_batching": {"mode": "race"},
        "planner": planner,
        "streaming": {"scaling": scaling, "group_tokens": 16384},
    }
    result = simulation("race", journal, steps=8, rollout=rollout).run()
    assert all(step.samples == 16 * 8 for step in result.steps)
    started, ended = set(), set()
    for _, event, made in journal.lines:
        started |= {d.attempt for d in made if isinstance(d, do.StartAttempt)}
        if isinstance(event, ev.AttemptFinished | ev.AttemptAborted):
            ended.add(event.attempt)
    assert started == ended


def test_events_of_a_step_of_1024_samples() -> None:
    """One event for each end and each reward, and a few for the step: nothing polls."""
    journal = Journal()
    simulation("off", journal, steps=3, prompts=128).run()
    kinds = journal.kinds()
    assert kinds[ev.AttemptFinished] == kinds[ev.AttemptGraded] == 3 * 1024
    once = (ev.StepStarted, ev.PromptsDrawn, ev.RoundMeasured, ev.UpdateApplied)
    once = (*once, ev.WeightsPublished)
    assert [kinds[each] for each in once] == [3, 3, 3, 3, 3]
    assert kinds.total() - kinds[ev.GradientsAccumulated] == 3 * (2 * 1024 + 5)
    assert kinds[ev.GradientsAccumulated] < 3 * 512


def test_events_of_a_race_of_1600_attempts() -> None:
    journal = Journal()
    simulation("race", journal, steps=3, prompts=128).run()
    started = sum(isinstance(d, do.StartAttempt) for _, _, made in journal.lines for d in made)
    assert started == 3 * 160 * 10
    kinds = journal.kinds()
    graded = kinds[ev.AttemptGraded]
    assert graded >= 3 * 1024
    # Each attempt ends once; one that is aborted while it is graded is told of twice.
    ends = kinds[ev.AttemptFinished] + kinds[ev.AttemptAborted]
    assert started <= ends <= 2 * started - graded + 3 * 1024
    few = kinds.total() - ends - graded
    assert few < 3 * 700


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "race"])
def test_memory_is_flat_in_the_number_of_steps(mode: str) -> None:
    steps = simulation(mode, steps=500, prompts=4).steps()
    tracemalloc.start()
    try:
        for _ in range(200):
            next(steps)
        before = tracemalloc.get_traced_memory()[0]
        done = sum(1 for _ in steps)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert done == 300
    assert after - before < 300 * done


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 5}, "gpus=5 do not divide into training replicas of 2 GPUs: .* multiple of 2$"),
        ({"rollout_tp": 3}, "gpus=16 do not .*: take a multiple of 3, or another rollout_tp$"),
        (
            {"rollout_tp": 3, "calibration": "paper-14b-16k"},
            "rollout_tp=3: training replicas of 4 GPUs do not .*: change it$",
        ),
    ],
)
def test_devices_that_do_not_divide_are_said_with_what_to_change(changes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulation("off", **changes)
