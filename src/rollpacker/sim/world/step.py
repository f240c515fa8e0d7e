"""The record of a simulated step in progress, and what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.core.types import AttemptId, EngineId, PromptId, RoundKind
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.sim.workload.turn_script import TurnScript
from rollpacker.sim.world.result import StepResult
from rollpacker.sim.world.worker import StepWork


@dataclass(slots=True)
class SimulatedAttempt:
    """An attempt of the step in progress."""

    prompt: PromptId
    index: int
    engine: EngineId
    course: TurnScript
    reward: float = 0.0
    decoding: bool = True
    """An engine has it, or will."""
    acting: bool = False
    """Its environment is at work."""
    stopping: bool = False
    target: EngineId | None = None
    """Where a migrating attempt goes."""
    born: int = 0
    """Step of its first token."""
    stale: int = 0
    """Tokens of earlier steps."""
    graded: bool = False


@dataclass(slots=True)
class SimulatedStep:
    """The record of the step in progress. Times in seconds since the simulation began."""

    number: int
    start_s: float
    rollout_start_s: float = 0.0
    kind: RoundKind = RoundKind.FULL
    last_end_s: float = 0.0
    rollout_end_s: float = 0.0
    samples: int = 0
    kept_tokens: int = 0
    longest_tool_s: float = 0.0
    """Longest time that one response waits for its tools."""
    summed: bool = False
    """Whether there are gradients to apply."""
    over: bool = False
    attempts: dict[AttemptId, SimulatedAttempt] = field(
        default_factory=dict[AttemptId, SimulatedAttempt]
    )
    trained: set[PromptId] = field(default_factory=set[PromptId])
    """Kept groups that have gradients."""
    groups: dict[PromptId, tuple[AttemptId, ...]] = field(
        default_factory=dict[PromptId, tuple[AttemptId, ...]]
    )
    deferred: set[PromptId] = field(default_factory=set[PromptId])

    def carried(self) -> dict[tuple[PromptId, int], SimulatedAttempt]:
        """What its losers have, by prompt and sample: they go on from there (mode ``partial``)."""
        return {
            (attempt.prompt, attempt.index): attempt
            for attempt in self.attempts.values()
            if attempt.prompt in self.deferred and attempt.course.so_far
        }


def step_result(
    step: SimulatedStep, work: Sequence[StepWork], end: float, fleet: Fleet
) -> StepResult:
    """A finished step.

    Args:
        step: its record.
        work: of each worker.
        end: when it ended.
        fleet: engines of the smallest size, and training replicas of one size.
    """
    seconds = end - step.start_s
    replica, decoding = len(next(iter(fleet.replicas.values()))), len(fleet.engines) * fleet.tp
    busy = sum(w.decode_s + w.train_s * replica for w in work)
    tool_wait_s = sum(w.tool_wait_s for w in work) / decoding
    kept = [step.attempts[attempt] for group in step.groups.values() for attempt in group]
    total = len(fleet.devices)
    used_s = busy / total + tool_wait_s * (decoding / total)
    return StepResult(
        step=step.number,
        kind=step.kind,
        step_s=seconds,
        rollout_s=step.rollout_end_s - step.rollout_start_s,
        grade_wait_s=step.rollout_end_s - step.last_end_s,
        train_s=end - step.rollout_end_s,
        samples=step.samples,
        kept_tokens=step.kept_tokens,
        stale_tokens=sum(attempt.stale for attempt in kept),
        oldest=max((step.number - attempt.born for attempt in kept), default=0),
        decoded_tokens=sum(w.generated_tokens for w in work),
        decode_steps=max(w.decode_steps for w in work),
        preemptions=sum(w.preemptions for w in work),
        peak_kv=max(w.peak_kv for w in work),
        bubble=1.0 - used_s / seconds if seconds > 0 else 0.0,
        tool_wait_s=tool_wait_s,
        longest_tool_s=step.longest_tool_s,
    )
