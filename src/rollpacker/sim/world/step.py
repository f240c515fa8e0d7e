"""Results of simulated steps and jobs, and the record of the step in progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollpacker.core.types import AttemptId, EngineId, PromptId, RoundKind
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.sim.workload.workload import TurnScript
from rollpacker.sim.world.worker import StepWork

# --- Results


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step. Times in seconds.

    Args:
        step_s: the whole step, including weight sync.
        rollout_s: from the first request to the last decision of the rollout.
        grade_wait_s: part of it after the last response had ended.
        train_s: from the end of the rollout to the end of the step.
        decode_steps: of the engine with the most.
        peak_kv: largest share of an engine's KV cache in use.
        bubble: share of device time without decoding, gradients or ``tool_wait_s``.
        tool_wait_s: while all responses of an engine wait for tools, mean over engines.
        longest_tool_s: longest time that one response waits for its tools.
        stale_tokens: kept tokens that were decoded in earlier steps.
        oldest: most steps since the first token of a kept response.
    """

    step: int
    kind: RoundKind
    step_s: float
    rollout_s: float
    grade_wait_s: float
    train_s: float
    samples: int
    kept_tokens: int
    decoded_tokens: int
    decode_steps: int
    preemptions: int
    peak_kv: float
    bubble: float
    tool_wait_s: float = 0.0
    longest_tool_s: float = 0.0
    stale_tokens: int = 0
    oldest: int = 0


def mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 without values."""
    all_ = list(values)
    return sum(all_) / len(all_) if all_ else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A simulated job.

    Args:
        kept_vs_true_len: mean length of kept responses over that of all sampled without a race.
        packing_s: mean seconds of a step's rollout if every engine were always full, without tools.
        single_sequence_s: seconds of a response of ``cap`` tokens, decoded alone, without tools.
        sim_wall_s: seconds that the simulation took, if its caller measured them.
    """

    steps: Sequence[StepResult]
    kept_vs_true_len: float
    packing_s: float
    cap: int
    single_sequence_s: float
    sim_wall_s: float | None = None

    @property
    def mean_step_s(self) -> float:
        return mean(s.step_s for s in self.steps)

    @property
    def samples_per_s(self) -> float:
        total = sum(s.step_s for s in self.steps)
        return sum(s.samples for s in self.steps) / total if total else 0.0

    @property
    def tool_wait_s(self) -> float:
        return mean(s.tool_wait_s for s in self.steps)

    @property
    def tool_bound_s(self) -> float:
        return mean(s.longest_tool_s for s in self.steps)

    @property
    def bubble(self) -> float:
        total = sum(s.step_s for s in self.steps)
        return sum(s.bubble * s.step_s for s in self.steps) / total if total else 0.0

    @property
    def stale_share(self) -> float:
        kept = sum(s.kept_tokens for s in self.steps)
        return sum(s.stale_tokens for s in self.steps) / kept if kept else 0.0

    def of(self, kind: RoundKind) -> list[StepResult]:
        return [s for s in self.steps if s.kind == kind]


@dataclass(slots=True)
class SimulatedAttempt:
    """An attempt of the step in progress."""

    prompt: PromptId
    index: int
    engine: EngineId
    course: TurnScript
    reward: float = 0.0
    decoding: bool = True
    acting: bool = False
    stopping: bool = False
    target: EngineId | None = None
    born: int = 0
    stale: int = 0
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
    summed: bool = False
    over: bool = False
    attempts: dict[AttemptId, SimulatedAttempt] = field(
        default_factory=dict[AttemptId, SimulatedAttempt]
    )
    trained: set[PromptId] = field(default_factory=set[PromptId])
    groups: dict[PromptId, tuple[AttemptId, ...]] = field(
        default_factory=dict[PromptId, tuple[AttemptId, ...]]
    )
    deferred: set[PromptId] = field(default_factory=set[PromptId])

    def carried(self) -> dict[tuple[PromptId, int], SimulatedAttempt]:
        return {
            (attempt.prompt, attempt.index): attempt
            for attempt in self.attempts.values()
            if attempt.prompt in self.deferred and attempt.course.so_far
        }


def step_result(
    step: SimulatedStep, work: Sequence[StepWork], end: float, fleet: Fleet
) -> StepResult:
    """Return the result of a finished step. ``fleet``: engines of the smallest size, and
    training replicas of one size."""
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
