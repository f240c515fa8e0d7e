"""The steps of a trace on simulated machines, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.config import RolloutConfig, TailBatchingConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.polytrace.model.lengths import Floats, Lengths
from rollpacker.sim.costs import calibration as calibrations
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.workload.source import LengthSource
from rollpacker.sim.workload.workload import Recorded, recorded_turns
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation
from rollpacker.trace_replay.plan import StepPlan


def replay_costs(plans: Sequence[StepPlan], name: str | None) -> Calibration:
    """Return a calibration by name or file. Default: the built-in one nearest to the longest
    response. The trace's own rewards replace the calibration's. Since nothing is trained, one
    engine's GPUs are enough."""
    if name is None:
        costs = calibrations.nearest(max(_longest(plan) for plan in plans))
    else:
        costs = calibrations.load(name)
    own = {"synchronous_reward_s": 0.0, "train_gpus": costs.rollout_tp}
    return costs.model_copy(update=own)


def assumptions(plans: Sequence[StepPlan], costs: Calibration, gpus: int | None) -> list[str]:
    """Describe a simulated replay's assumptions, one text each."""
    devices = "CPU workers" if costs.measured else costs.device
    said = [f"simulated: {costs.name}, {costs.model} on {gpus or costs.gpus} {devices}, mode off"]
    if any(len(response.turns) > 1 for plan in plans for response in plan.responses):
        said.append("a turn's context is prefilled again if its engine has freed the KV since")
    if any(len({len(group) for group in plan.groups}) > 1 for plan in plans):
        said.append("prompts with fewer responses than others get additional, redrawn ones")
    return said


def replay(
    plan: StepPlan, costs: Calibration, *, gpus: int | None, concurrency: int, seed: int
) -> dict[str, Any]:
    """Simulate one step, with every response at its recorded length, and return its
    measurements. ``gpus``: None takes the calibration's. ``concurrency``: most sequences per
    engine."""
    config = SimulationConfig(
        calibration=costs.name,
        workload="trace",
        steps=1,
        seed=seed,
        gpus=gpus,
        max_running=concurrency,
        rollout=RolloutConfig(
            prompts_per_step=len(plan.groups),
            num_generations=max(len(each) for each in plan.groups),
            max_completion_length=_longest(plan),
            tail_batching=TailBatchingConfig(mode="off"),
        ),
    )
    places: dict[PromptId, int] = {}
    attempts: dict[AttemptId, tuple[int, int]] = {}
    ended: dict[tuple[int, int], float] = {}

    def follow(now: float, event: ev.Event, decisions: Sequence[do.Decision]) -> None:
        if isinstance(event, ev.PromptsDrawn):
            places.update((prompt.id, at) for at, prompt in enumerate(event.prompts))
        elif isinstance(event, ev.AttemptFinished):
            ended[attempts[event.attempt]] = now
        for made in decisions:
            if isinstance(made, do.StartAttempt):
                attempts[made.attempt] = (places[made.prompt], made.index)

    step = Simulation(config, costs, _source(plan), record=follow).run().steps[0]
    rollout_s = step.rollout_s - step.grade_wait_s
    reward_s = _reward_s(plan, ended)
    return {
        "step": plan.step,
        "step_s": rollout_s + reward_s,
        "rollout_s": rollout_s,
        "tool_wait_s": step.tool_wait_s,
        "reward_s": reward_s,
        "responses": step.samples,
        "turns": len(plan.turns),
        "generated_tokens": step.decoded_tokens,
        "decode_steps": step.decode_steps,
        "preemptions": step.preemptions,
        "rates": {"tokens_per_s": step.decoded_tokens / rollout_s},
    }


class Redrawn(Lengths):
    """Prompts and their responses, both drawn with replacement. A ``Lengths`` without
    parameters. Column 0 of the traits is the visit's number instead of a normal score.
    ``tokens``: lengths, shape (n,). ``groups``: visit of each, from 0, none empty, shape (n,)."""

    def __init__(self, tokens: Floats, groups: NDArray[np.int64]) -> None:
        self._tokens = tokens[np.argsort(groups, kind="stable")]
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        """Return the numbers of visits, shape (prompts, 1)."""
        return rng.integers(self._sizes.size, size=(prompts, 1)).astype(np.float64)

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        """Return lengths of the visits' responses, shape (prompts, responses)."""
        visit = traits[:, :1].astype(np.int64)
        shape = (traits.shape[0], responses)
        place = np.floor(rng.random(shape) * self._sizes[visit]).astype(np.int64)
        return self._tokens[self._starts[visit] + place].astype(np.int32)


def _source(plan: StepPlan) -> LengthSource:
    lengths = [np.array([max(1, r.tokens) for r in g], np.int32) for g in plan.groups]
    visits = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths])
    openings = [response.turns[0].prompt for response in plan.responses]
    return LengthSource(
        lengths=Redrawn(np.concatenate(lengths).astype(np.float64), visits),
        recorded=tuple(
            Recorded(np.array([[float(at)]]), each, turns=tuple(map(recorded_turns, group)))
            for at, (each, group) in enumerate(zip(lengths, plan.groups, strict=True))
        ),
        cap=_longest(plan),
        prompt_tokens=max(1, round(sum(openings) / len(openings))),
    )


def _longest(plan: StepPlan) -> int:
    return max(1, max(response.tokens for response in plan.responses))


def _reward_s(plan: StepPlan, ended: Mapping[tuple[int, int], float]) -> float:
    graded = [
        ended[at, index] + response.reward_s
        for at, group in enumerate(plan.groups)
        for index, response in enumerate(group)
    ]
    return max(graded) - max(ended.values()) + plan.batch_reward_s
