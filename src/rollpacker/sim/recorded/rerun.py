"""Repeat a real run in the simulator: its prompts, lengths and rewards, with calibrated costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rollpacker.core.attempts import RecordedAttempt
from rollpacker.core.types import Prompt, PromptId
from rollpacker.policy.engines.fleet import colocated, grid
from rollpacker.policy.rollout import from_journal
from rollpacker.polytrace.compare import METRICS, STEP, Comparison, TimedSteps, compare
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.recorded.fit_costs import calibrate, timed
from rollpacker.sim.recorded.run_record import RunRecord, RunStep
from rollpacker.sim.workload.workload import ScriptedTurn, Turns
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.step import StepResult, mean
from rollpacker.sim.world.world import World


class Tried(NamedTuple):
    """A recorded attempt.

    Args:
        turns: finished turns of its environment, from the environment's start on.
        tokens: sampled. A lower bound until it has ended.
        waited_s: seconds of its environment's work when it was stopped. None if it was not.
    """

    turns: Turns = ()
    tokens: int = 0
    waited_s: float | None = None
    reward: float | None = None
    ended: bool = False


def tried(attempt: RecordedAttempt, *, acts: bool) -> Tried:
    """Convert an attempt of the run's reader. ``acts``: the run has environments."""
    ended = attempt.finish_reason is not None
    # One that was stopped while it decoded has a part of a turn.
    told = [turn for turn in attempt.turns if ended or turn.latency_s is not None]
    turns = [ScriptedTurn(turn.tokens, turn.wait_s, turn.added) for turn in told]
    if attempt.acts:
        turns.insert(0, ScriptedTurn(0, attempt.opening_s))
    waited_s = None
    if not ended and attempt.end_s is not None and (attempt.acting or acts > attempt.acts):
        waited_s = attempt.end_s - (attempt.since_s or 0.0)
    tokens = max(attempt.tokens, sum(turn.tokens for turn in told))
    return Tried(tuple(turns), tokens, waited_s, attempt.reward, ended)


class RunWorkload:
    """The samples of a run, repeated. An unfinished response continues like a longer one, of the
    same step if possible."""

    def __init__(self, run: RunRecord) -> None:
        self._tried: dict[tuple[int, PromptId, int], Tried] = {}
        self._ended: dict[int, list[Tried]] = {}
        self._all_ended: list[Tried] = []
        acts = any(each.acts for step in run.steps for each in step.attempts)
        for step in run.steps:
            known = {
                (step.number, PromptId(each.prompt), each.index): tried(each, acts=acts)
                for each in step.attempts
            }
            self._tried |= known
            ended = [one for one in known.values() if one.ended]
            self._ended[step.number] = sorted(ended, key=lambda one: one.tokens)
            self._all_ended += ended
        self.prompt_tokens = round(mean(run.prompt_tokens.values()))
        self._seed: int = run.settings["seed"]
        self._cap: int = run.settings["cap"]
        self._left: Iterator[dict[str, int]] = iter([step.remaining for step in run.steps])
        self._coming: dict[str, list[Prompt]] = {}
        for step in run.steps:
            for prompt in step.drawn:
                self._coming.setdefault(prompt.domain, []).append(prompt)
        self._domain: dict[PromptId, str] = {}

    def remaining(self) -> dict[str, int]:
        return next(self._left)

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Return the next prompts of the run. Raises ``ValueError`` if it drew no more."""
        drawn: list[Prompt] = []
        for domain, count in counts.items():
            coming = self._coming.get(domain, [])
            if len(coming) < count:
                raise ValueError("the run drew fewer prompts than its simulation would")
            drawn += coming[:count]
            del coming[:count]
        self._domain |= {prompt.id: prompt.domain for prompt in drawn}
        return tuple(drawn)

    def turns(self, step: int, prompt: PromptId, index: int) -> Turns:
        known = self._tried.get((step, prompt, index), Tried())
        if known.ended:
            return whole(known)
        of_step = self._ended[step]
        rng = np.random.default_rng([self._seed, step, index, len(of_step), known.tokens])
        return gone_on(known, (of_step, self._all_ended), self._cap, rng)

    def reward(self, step: int, prompt: PromptId, index: int) -> float:
        return self._tried.get((step, prompt, index), Tried()).reward or 0.0

    def domain(self, prompt: PromptId) -> str:
        return self._domain[prompt]

    def run_s(self, step: int, prompt: PromptId, index: int) -> float:  # noqa: ARG002
        """Return the run's mean seconds, since programs are not distinguished."""
        return 0.0

    def forget(self, prompt: PromptId) -> None:
        """Do nothing: the workload keeps no prompts."""


def gone_on(
    one: Tried, ended: Sequence[Sequence[Tried]], cap: int, rng: np.random.Generator
) -> Turns:
    """Continue a stopped attempt like another one that went on for longer.

    If it was stopped while its environment worked, it continues like one that waited longer there.
    ``ended``: finished responses, the most similar first. ``cap``: tokens of the result without a
    longer one.
    """
    if one.waited_s is None:
        known, current = one.turns, one.tokens - sum(turn.tokens for turn in one.turns)
    else:
        known, current = one.turns[:-1], 0
    for some in ended:
        longer = [turns for each in some if (turns := _longer(one, len(known), each))]
        if longer:
            turn, *rest = longer[rng.choice(len(longer))]
            if one.waited_s is not None and one.turns:
                turn = turn._replace(tokens=one.turns[-1].tokens)
            return (*known, turn, *rest)
    if one.waited_s is None:
        return (*known, ScriptedTurn(max(1, current, cap - one.tokens + current)))
    last = one.turns[-1] if one.turns else ScriptedTurn(0)
    return (*known, last._replace(tool_s=one.waited_s), ScriptedTurn(1))


def whole(one: Tried) -> Turns:
    """Return the turns of a response that ended."""
    return tuple(one.turns) or (ScriptedTurn(max(1, one.tokens)),)


def _longer(one: Tried, number: int, other: Tried) -> Turns:
    turns = whole(other)
    if len(turns) <= number:
        return ()
    rest = turns[number:]
    if one.waited_s is not None:
        return rest if rest[0].tool_s > one.waited_s else ()
    if not one.turns and not one.tokens:  # nothing is known of it
        return rest
    current = one.tokens - sum(turn.tokens for turn in one.turns)
    return rest if rest[0].tokens > current else ()


def rerun(run: RunRecord, calibration: Calibration) -> list[StepResult]:
    """Simulate every step of a run under its own policy."""
    policy = from_journal({"settings": run.settings, "state": run.state})
    gpus = len(run.steps[0].engines)
    costs = WorldCosts.of(
        calibration,
        fleet=colocated(grid(gpus, gpus), tensor_parallel=1, replica=1),
        kinds=dict.fromkeys(policy.settings.sizes, "math"),
        reward_phase=not policy.settings.asynchronous_grading,
    )
    world = World(policy, RunWorkload(run), costs)
    return [world.run_step(step.number) for step in run.steps]


def replayed(
    run: RunRecord, calibration: Calibration, steps: Sequence[RunStep] | None = None
) -> tuple[TimedSteps, TimedSteps]:
    """Return simulated and measured seconds of steps, of their rollouts and of their training.
    ``steps``: default is all except the first."""
    chosen = {step.number for step in (timed(run) if steps is None else steps)}
    alone = not run.settings["asynchronous_grading"]
    phase_s = calibration.synchronous_reward_s if alone else 0.0
    both = zip(run.steps, rerun(run, calibration), strict=True)
    pairs = [(step, result) for step, result in both if step.number in chosen]
    whole = [result.step_s for _, result in pairs]
    train = [result.train_s - phase_s for _, result in pairs]
    rollout = [a - b for a, b in zip(whole, train, strict=True)]
    numbers = tuple(step.number for step, _ in pairs)
    predicted = {STEP: tuple(whole), "rollout": tuple(rollout), "train": tuple(train)}
    measured = {phase: tuple(step.measured[phase] for step, _ in pairs) for phase in METRICS}
    return (
        TimedSteps(source="predicted", steps=numbers, phases=predicted),
        TimedSteps(source="measured", steps=numbers, phases=measured),
    )


def held_back(run: RunRecord) -> Comparison:
    """Return the accuracy on odd steps of costs that were fitted to even ones."""
    steps = timed(run)
    even = [step for step in steps if step.number % 2 == 0]
    odd = [step for step in steps if step.number % 2]
    return compare(*replayed(run, calibrate(run, even), odd))
