"""The record of one step: what was run, kept, thrown away, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.core import decisions as do
from rollpacker.core.types import AttemptId, EngineId, PromptId, ReplicaId, RoundKind
from rollpacker.runtime.attempts import Attempt
from rollpacker.runtime.bubble import bubble, union
from rollpacker.runtime.messages import Work
from rollpacker.train.base import Update


class DroppedError(RuntimeError):
    """A step or an evaluation was given up on its way; the weights are those it began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTask:
    """A stretch of time that a replica spent on gradients or on an update, run-clock seconds."""

    step: int
    replica: ReplicaId
    kind: str
    prompts: tuple[PromptId, ...]
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Filled in while the step runs."""

    step: int
    start_s: float
    kind: RoundKind = RoundKind.FULL
    rollout_end_s: float = 0.0
    end_s: float = 0.0
    attempts: dict[AttemptId, Attempt] = field(default_factory=dict[AttemptId, Attempt])
    kept: list[Attempt] = field(default_factory=list[Attempt])
    trained: list[PromptId] = field(default_factory=list[PromptId])
    dropped: dict[PromptId, str] = field(default_factory=dict[PromptId, str])
    deferred: list[PromptId] = field(default_factory=list[PromptId])
    faults: list[str] = field(default_factory=list[str])
    tasks: list[ReplicaTask] = field(default_factory=list[ReplicaTask])
    updates: list[Update] = field(default_factory=list[Update])
    beside: Mapping[ReplicaId, tuple[EngineId, ...]] = field(
        default_factory=dict[ReplicaId, tuple[EngineId, ...]]
    )
    work: dict[EngineId, Work] = field(default_factory=dict[EngineId, Work])

    def accept(self, decision: do.AcceptGroup) -> list[Attempt]:
        """Note a kept group; returns its attempts by sample index."""
        group = [self.attempts[attempt] for attempt in decision.attempts]
        for attempt in group:
            attempt.verdict = "kept"
        self.kept.extend(group)
        self.trained.append(decision.prompt)
        return group

    def drop(self, decision: do.DropGroup) -> None:
        """Note a group that is not trained on."""
        self.dropped[decision.prompt] = decision.reason
        for attempt in decision.attempts:
            self.attempts[attempt].verdict = "dropped"

    def aborted_tokens(self) -> int:
        """Tokens that were decoded and thrown away."""
        return sum(a.tokens for a in self.attempts.values() if a.verdict != "kept")

    def resampled(self) -> int:
        """Responses that were sampled again, or given up, because their reward failed."""
        return sum(a.verdict == "failed" and a.graded_s is not None for a in self.attempts.values())

    def timing_s(self) -> dict[str, float]:
        """Seconds of the step's phases; ``grade_wait`` is that after the last response."""
        ends = [a.end_s for a in self.attempts.values() if a.end_s is not None]
        applies = [task.end_s - task.start_s for task in self.tasks if task.kind == "apply"]
        return {
            "rollout": self.rollout_end_s - self.start_s,
            "train": self.end_s - self.rollout_end_s,
            "grade_wait": max(0.0, self.rollout_end_s - max(ends, default=self.rollout_end_s)),
            "gradients": sum(t.end_s - t.start_s for t in self.tasks if t.kind == "accumulate"),
            "score": sum(t.end_s - t.start_s for t in self.tasks if t.kind == "score"),
            "apply": max(applies, default=0.0),
            "worker_cpu": sum(work.cpu_s for work in self.work.values()),
            "decode_cpu": sum(work.decode_cpu_s for work in self.work.values()),
        }

    def engine(self) -> dict[str, float]:
        """Work of the engines; ``steps`` are those of the one with the most."""
        work = list(self.work.values())
        return {
            "steps": max((w.decode_steps for w in work), default=0),
            "generated_tokens": sum(w.generated_tokens for w in work),
            "prefill_tokens": sum(w.prefill_tokens for w in work),
            "preemptions": sum(w.preemptions for w in work),
        }

    def bubble(self) -> dict[str, float]:
        """Share of device time in which nothing was decoded nor trained, by phase.

        A replica shares its devices with the engines ``beside`` it.
        """
        # Most begin together: of those, the one that ends last covers the others.
        ends: dict[tuple[EngineId, float], float] = {}
        for attempt in self.attempts.values():
            for engine, began, stopped in attempt.decoding(self.end_s):
                if stopped >= ends.get((engine, began), began):
                    ends[engine, began] = stopped
        spans: dict[int, list[tuple[float, float]]] = {engine: [] for engine in self.work}
        for (engine, began), stopped in ends.items():
            spans.setdefault(engine, []).append((began, stopped))
        for task in self.tasks:
            for engine in self.beside.get(task.replica, (task.replica,)):
                spans.setdefault(engine, []).append((task.start_s, task.end_s))
        busy = [union(each) for each in spans.values()]
        return {
            "rollout": bubble(busy, self.start_s, self.rollout_end_s),
            "train": bubble(busy, self.rollout_end_s, self.end_s),
            "total": bubble(busy, self.start_s, self.end_s),
        }
