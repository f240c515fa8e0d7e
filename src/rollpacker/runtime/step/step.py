"""The record of one step: attempts, groups, losses and times."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import NO_DRAFTS, AttemptId, EngineId, PromptId, ReplicaId, RoundKind
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.policy.rounds.tail_batching import NO_VARIANCE
from rollpacker.runtime.attempts.attempts import Trajectory, TrajectoryStage
from rollpacker.runtime.messages.messages import Work, joined
from rollpacker.runtime.step.bubble import Span, bubble, union
from rollpacker.train.base import Update


class DroppedError(RuntimeError):
    """A step or an evaluation was given up. The weights are those of its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTask:
    """A replica's time for gradients or an update, in run-clock seconds."""

    step: int
    replica: ReplicaId
    kind: str
    prompts: tuple[PromptId, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """From ``at_s`` (run-clock seconds) on, ``engine`` decodes on all its members' devices."""

    engine: EngineId
    members: tuple[EngineId, ...]
    at_s: float


_NOBODY = Fleet(layout="colocated", engines={}, replicas={})


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Filled in while the step runs. ``fleet``: at its beginning. Without ``training`` its
    responses are only measured, each graded by itself."""

    step: int
    start_s: float
    training: bool = True
    kind: RoundKind = RoundKind.FULL
    rollout_end_s: float = 0.0
    end_s: float = 0.0
    attempts: dict[AttemptId, Trajectory] = field(default_factory=dict[AttemptId, Trajectory])
    kept: list[Trajectory] = field(default_factory=list[Trajectory])
    trained: list[PromptId] = field(default_factory=list[PromptId])
    dropped: dict[PromptId, str] = field(default_factory=dict[PromptId, str])
    deferred: list[PromptId] = field(default_factory=list[PromptId])
    faults: list[str] = field(default_factory=list[str])
    tasks: list[ReplicaTask] = field(default_factory=list[ReplicaTask])
    formed: list[Formation] = field(default_factory=list[Formation])
    updates: list[Update] = field(default_factory=list[Update])
    fleet: Fleet = _NOBODY
    work: dict[EngineId, Work] = field(default_factory=dict[EngineId, Work])

    @property
    def draw(self) -> int:
        """The step in seeds. All measurements use the same random numbers."""
        return self.step if self.training else -1

    @property
    def begun(self) -> list[PromptId]:
        """Prompts in the order of their start, which no response's speed can change."""
        return list(dict.fromkeys(attempt.prompt for attempt in self.attempts.values()))

    def accept(self, decision: do.AcceptGroup) -> list[Trajectory]:
        group = [self.attempts[attempt] for attempt in decision.attempts]
        for attempt in group:
            attempt.verdict = "kept"
        self.kept.extend(group)
        self.trained.append(decision.prompt)
        return group

    def drop(self, decision: do.DropGroup) -> None:
        self.dropped[decision.prompt] = decision.reason
        for attempt in decision.attempts:
            self.attempts[attempt].verdict = "dropped"

    def add_work(self, engine: EngineId, work: Work) -> None:
        before = self.work.get(engine)
        self.work[engine] = work if before is None else before + work

    def measured(self) -> ev.RoundMeasured:
        work = self.work.values()
        return ev.RoundMeasured(step=self.step, preemptions=sum(each.preemptions for each in work))

    def timed(self) -> ev.DecodeTimed | None:
        """The times of the engines' decode steps. None if no engine measures them."""
        seconds: dict[int, list[float]] = {}
        for work in self.work.values():
            for rows, each in work.decode_s.items():
                seconds.setdefault(rows, []).append(each)
        if not seconds:
            return None
        return ev.DecodeTimed(
            step=self.step,
            rows=tuple(
                (rows, round(statistics.mean(seconds[rows]), 9)) for rows in sorted(seconds)
            ),
        )

    def check_graded(self) -> None:
        """Raise ``ValueError`` if no response got a reward, as every prompt would be dropped."""
        if self.faults and not any(
            a.stage is TrajectoryStage.GRADED for a in self.attempts.values()
        ):
            raise ValueError(f"step {self.step}: no response got a reward: {self.faults[-1]}")

    def aborted_tokens(self) -> int:
        lost = [a for a in self.attempts.values() if a.verdict not in ("kept", "carried")]
        # A failed attempt starts again with its tokens of earlier steps.
        return sum(a.tokens - (a.stale if a.verdict == "failed" else 0) for a in lost)

    def resampled(self) -> int:
        """Responses that were sampled again or given up because their reward failed."""
        return sum(a.verdict == "failed" and a.graded_s is not None for a in self.attempts.values())

    def timing_s(self) -> dict[str, float]:
        """Seconds of the step's phases. ``grade_wait`` is the wait after the last response."""
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
        """Work of the engines. ``steps`` are those of the engine with the most."""
        work = list(self.work.values())
        return {
            "steps": max((w.decode_steps for w in work), default=0),
            "generated_tokens": sum(w.generated_tokens for w in work),
            "prefill_tokens": sum(w.prefill_tokens for w in work),
            "cached_tokens": sum(w.cached_tokens for w in work),
            "preemptions": sum(w.preemptions for w in work),
        }

    def step_times(self) -> list[list[float]]:
        """``StepSums`` of all engines, by speculative decoding (0, 1) and number of sequences."""
        times = joined(work.step_times for work in self.work.values())
        return [
            [float(ahead), *(round(each, 6) for each in sums)]
            for (ahead, *_), sums in sorted(times.items())
        ]

    def filtered(self) -> dict[str, float]:
        """Dynamic sampling: the mean reward of all groups and of dropped ones, and the share of
        dropped groups. Metrics without values are left out."""
        equal = sum(reason == NO_VARIANCE for reason in self.dropped.values())
        rewards = [(a.verdict, a.reward) for a in self.attempts.values() if a.reward is not None]
        dropped = [reward for verdict, reward in rewards if verdict == "dropped"]
        every = [*dropped, *(reward for verdict, reward in rewards if verdict == "kept")]
        found = {"reward": every, "dropped_reward": dropped}
        result = {name: statistics.fmean(each) for name, each in found.items() if each}
        if equal or self.trained:
            result["dropped"] = equal / (equal + len(self.trained))
        return result

    def drafts(self) -> dict[str, float]:
        """Speculative decoding: draft tokens, accepted ones, and the tokens of a verification, over
        all responses and for the one that ended the rollout."""
        ended = [a for a in self.attempts.values() if a.end_s is not None]
        every = NO_DRAFTS
        for attempt in ended:
            every = every.plus(attempt.drafts)
        last = max(ended, key=lambda a: (a.end_s, a.id), default=None)
        return {
            "drafted": every.drafted,
            "accepted": every.accepted,
            "tokens_per_verification": every.tokens,
            "last_tokens_per_verification": 1.0 if last is None else last.drafts.tokens,
            "last_verifications": 0 if last is None else last.drafts.verifications,
        }

    def bubble(self) -> dict[str, float]:
        """The idle share of device time by phase, over devices that took part."""
        decoding, training = self._decoding(), self._training()
        engines = {device: one for one, devices in self.fleet.engines.items() for device in devices}
        # Devices of the same engine and the same replica have the same times.
        alike = Counter(
            (engines.get(device), self.fleet.at.get(device)) for device in self.fleet.devices
        )
        busy = [
            (count, union([*decoding.get(engine, ()), *training.get(replica, ())]))
            for (engine, replica), count in alike.items()
            if engine in decoding or replica in training
        ]
        return {
            "rollout": bubble(busy, self.start_s, self.rollout_end_s),
            "train": bubble(busy, self.rollout_end_s, self.end_s),
            "total": bubble(busy, self.start_s, self.end_s),
        }

    def _decoding(self) -> dict[EngineId | None, list[Span]]:
        # Most attempts begin together. The one that ends last covers the others.
        ends: dict[tuple[EngineId, float], float] = {}
        for attempt in self.attempts.values():
            for engine, began, stopped in attempt.decoding(self.end_s):
                if stopped >= ends.get((engine, began), began):
                    ends[engine, began] = stopped
        spans: dict[EngineId | None, list[Span]] = {engine: [] for engine in self.work}
        for (engine, began), stopped in ends.items():
            spans.setdefault(engine, []).append((began, stopped))
        for formation in self.formed:
            began = formation.at_s
            together = [(max(s, began), e) for s, e in spans.get(formation.engine, ()) if e > began]
            for member in formation.members:
                if member != formation.engine:
                    spans.setdefault(member, []).extend(together)
        return spans

    def _training(self) -> dict[ReplicaId | None, list[Span]]:
        spans: dict[ReplicaId | None, list[Span]] = {}
        for task in self.tasks:
            spans.setdefault(task.replica, []).append((task.start_s, task.end_s))
        return spans
