"""From kept groups to new weights: advantages, gradient sums on replicas, one division, one update.
Streaming never changes the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from rollpacker.config.rollout import StaleTokens
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import Group, GroupPart, PromptId, ReplicaId, Sample
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.step.step import ReplicaTask, StepRecord
from rollpacker.train.algorithms import Algorithm, Rewarded
from rollpacker.train.base import Partial, SampleId

NOTHING = Partial(normaliser=0.0, tokens=0, sums={})
_LARGEST = 1e19
"""The largest reward to train on. Gradients grow with it, and float32 must hold their squares."""


class _State(Enum):
    SUMMING = auto()
    """Replicas sum the gradients of the parts that they get."""
    HELD = auto()
    """The same, but nothing more is sent, as the nodes of training are not there yet."""
    SCORING = auto()
    """Replicas compute log-probabilities for later updates. Then this update goes on."""
    APPLYING = auto()
    """The weights of some replicas may have changed."""
    OVER = auto()


class Updates:
    """Runs the updates of one step on the replicas.

    Args:
        max_length: most sampled tokens of a response (reward shaping, constant normalisers).
        sampler_is_old: the sampler's log-probabilities are the old ones: they are of the whole
            softmax, and nothing corrects for a difference. Otherwise the trainer computes the old
            ones before the step's first update, for the groups of later updates.
        mask_truncated: leave truncated responses out of the loss.
        stale: rule for tokens of earlier weights (``tail_batching.stale_tokens``).
        most_skipped: updates in a row that may be skipped (``train.max_skipped_updates``).
    """

    def __init__(
        self,
        workers: Workers,
        algorithm: Algorithm,
        *,
        max_length: int,
        clock: Clock,
        sampler_is_old: bool = True,
        mask_truncated: bool = False,
        stale: StaleTokens = "fresh",
        most_skipped: int = 1,
    ) -> None:
        self._workers = workers
        self._algorithm = algorithm
        self._max_length = max_length
        self._clock = clock
        self._sampler_is_old = sampler_is_old
        self._mask_truncated = mask_truncated
        self._stale: StaleTokens = stale
        self._most_skipped = most_skipped
        self._checksums = True
        self._state = _State.OVER

    def begin(self, record: StepRecord, post: Callable[[ev.Event], None]) -> None:
        self._record = record
        self._post = post
        self._state = _State.SUMMING
        self._groups: dict[PromptId, Group] = {}
        self._rewarded: dict[PromptId, Rewarded] = {}
        self._partials: dict[ReplicaId, Partial] = {}
        self._applied: dict[ReplicaId, msg.Applied] = {}
        self._decision: do.ApplyUpdate | None = None
        self._held: list[do.AccumulateGradients | do.ApplyUpdate] = []
        self._begun: set[PromptId] = set()
        self._old: dict[SampleId, NDArray[np.float32]] = {}
        self._scoring: dict[ReplicaId, list[set[PromptId]]] = {}
        self._scored: set[PromptId] = set()
        self._sent: Counter[ReplicaId] = Counter()

    def release(self) -> None:
        """The nodes of training are there: send the held decisions in order."""
        held, self._held = self._held, []
        self._state = _State.SUMMING
        for decision in held:
            self.perform(decision)

    @property
    def summing(self) -> bool:
        return any(self._sent.values())

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    @property
    def applying(self) -> bool:
        return self._state is _State.APPLYING

    @property
    def begun(self) -> bool:
        """Whether the weights may differ from those of the step's beginning."""
        return self.applying or bool(self._record.updates)

    @property
    def over(self) -> bool:
        return self._state is _State.OVER

    def accept(self, attempts: Sequence[Trajectory]) -> None:
        """Take a complete group. Raises ``ValueError`` if a reward is too large to train on."""
        samples = tuple(map(self._sample, attempts))
        largest = max(samples, key=_size)
        if _size(largest) > _LARGEST:
            raise self._overflown("a reward is too large to train on", largest)
        rewarded = self._algorithm.reward(
            np.array([sample.reward for sample in samples], np.float64),
            np.array([sample.sampled for sample in samples], np.int64),
            self._max_length,
            np.array([self._mask_truncated and s.finish_reason == "length" for s in samples]),
        )
        prompt = attempts[0].prompt
        self._rewarded[prompt] = rewarded
        self._groups[prompt] = Group(prompt=prompt, samples=samples, advantages=rewarded.advantages)

    def _sample(self, attempt: Trajectory) -> Sample:
        sample = attempt.sample()
        if self._stale == "ratio":
            return replace(sample, old_logprobs=sample.logprobs)
        if self._stale == "mask" and attempt.carried:
            return replace(sample, stale=np.arange(len(sample.tokens)) < attempt.stale)
        return sample

    def rollout_over(self, *, hold: bool = False) -> None:
        """Compute advantages of the whole batch. ``hold`` keeps decisions until ``release``."""
        groups = list(self._groups.values())
        scaled = [group.advantages for group in groups]
        if self._algorithm.needs_batch and groups:
            scaled = self._algorithm.batch_advantages(list(self._rewarded.values()))
        for group, advantages in zip(groups, scaled, strict=True):
            self._groups[group.prompt] = replace(group, advantages=advantages)
        if hold:
            self._state = _State.HELD

    def perform(self, decision: do.AccumulateGradients | do.ApplyUpdate) -> None:
        """Send parts of groups to a replica's gradient sum, or update all replicas at once."""
        if self._state is _State.HELD:
            self._held.append(decision)
        elif isinstance(decision, do.AccumulateGradients):
            self._accumulate(decision.replica, decision.parts)
        else:
            self._apply(decision)

    def _accumulate(self, replica: ReplicaId, parts: tuple[GroupPart, ...]) -> None:
        self._sent[replica] += 1
        self._begun.update(part.prompt for part in parts)
        groups = [_cut(self._groups[part.prompt], part) for part in parts]
        if self.begun:
            groups = [self._aged(group) for group in groups]
        self._workers.to_replica(replica, msg.Accumulate(parts=parts, groups=groups))

    def _aged(self, group: Group) -> Group:
        """Add old log-probabilities, as the weights have changed since the group was sampled."""
        samples = tuple(
            replace(
                sample,
                old_logprobs=sample.logprobs
                if self._sampler_is_old
                else self._old.get((sample.prompt, sample.index)),
            )
            for sample in group.samples
        )
        return replace(group, samples=samples)

    def accumulated(self, replica: ReplicaId, report: msg.Accumulated) -> None:
        self._sent[replica] -= 1
        self._partials[replica] = self._partials.get(replica, NOTHING) + report.partial
        self._task(replica, "accumulate", report.parts, report.start_s, report.end_s)
        seconds = round(self._clock.at(report.end_s) - self._clock.at(report.start_s), 6)
        self._post(ev.GradientsAccumulated(replica=replica, parts=report.parts, seconds=seconds))

    def lose(self, replica: ReplicaId) -> None:
        """Forget a replica's gradients and scores, which others compute again. An update that has
        changed no weight yet is decided anew."""
        self._partials.pop(replica, None)
        self._sent.pop(replica, None)
        self._scoring.pop(replica, None)
        self._decision = None
        if self._state is _State.SCORING:
            self._state = _State.SUMMING
        self._held = [
            each
            for each in self._held
            if isinstance(each, do.AccumulateGradients) and each.replica != replica
        ]

    def _apply(self, decision: do.ApplyUpdate) -> None:
        """Begin an update. If no group was kept, it ends at once."""
        if not self._partials:
            self._finish(decision)
            return
        self._decision, self._state = decision, _State.SCORING
        if not (self._sampler_is_old or self.begun):
            self._score()
        # A replica in this process may have answered already.
        if self._state is _State.SCORING and not self._scoring:
            self._divide()

    def _finish(self, decision: do.ApplyUpdate) -> None:
        self._state = _State.OVER if decision.last else _State.SUMMING
        self._post(ev.UpdateApplied(step=self._record.step, update=decision.update))

    def _score(self) -> None:
        """Ask for log-probabilities of groups of later updates while the weights are those that
        sampled them, except for groups that are scored or being scored."""
        asked = self._scored.union(*(each for shares in self._scoring.values() for each in shares))
        groups = [g for p, g in self._groups.items() if p not in self._begun | asked]
        for replica, share in share_out(groups, self._workers.replicas).items():
            self._scoring.setdefault(replica, []).append({group.prompt for group in share})
            self._workers.to_replica(replica, msg.Score(groups=share))

    def scored(self, replica: ReplicaId, report: msg.ScoredSamples) -> None:
        self._old |= report.logprobs
        self._task(replica, "score", (), report.start_s, report.end_s)
        self._scored |= self._scoring[replica].pop(0)
        if not self._scoring[replica]:
            del self._scoring[replica]
        if self._state is _State.SCORING and not self._scoring:
            self._divide()

    def _divide(self) -> None:
        total = NOTHING
        for replica in sorted(self._partials):
            total = total + self._partials[replica]
        self._state = _State.APPLYING
        for replica in self._workers.replicas:
            self._workers.to_replica(replica, msg.Apply(total=total, checksum=self._checksums))

    def applied(self, replica: ReplicaId, report: msg.Applied) -> None:
        """Take a replica's update. After all of them, the weights must agree."""
        self._applied[replica] = report
        self._task(replica, "apply", (), report.start_s, report.end_s)
        if not self._applied.keys() >= {*self._workers.replicas}:
            return
        sums = {report.checksum for report in self._applied.values()}
        if len(sums) > 1:
            raise WorkerError(f"the workers' weights differ after step {self._record.step}")
        self._checksums = False
        update = self._applied[min(self._applied)].update
        self._record.updates.append(update)
        if update.skipped >= self._most_skipped:
            what = f"{update.skipped} updates in a row had a loss or gradient that is not finite"
            every = (sample for group in self.groups for sample in group.samples)
            raise self._overflown(f"{what}; of the rewards", max(every, key=_size))
        decision, self._decision = self._decision, None
        assert decision is not None
        self._partials.clear()
        self._applied.clear()
        self._finish(decision)

    def _overflown(self, what: str, largest: Sample) -> ValueError:
        scores = (f"reward '{name}': {score:.3g}" for name, score in largest.rewards.items())
        return ValueError(
            f"step {self._record.step}: {what}: the largest is {_size(largest):.3g}, of prompt "
            f"{largest.prompt} ({', '.join(scores)}). Scale it, or lower train.learning_rate and "
            "resume from an earlier checkpoint."
        )

    def check_next(self) -> None:
        """Compare the workers' weights after the next update."""
        self._checksums = True

    def _task(
        self,
        replica: ReplicaId,
        kind: str,
        parts: tuple[GroupPart, ...],
        start_s: float,
        end_s: float,
    ) -> None:
        self._record.tasks.append(
            ReplicaTask(
                step=self._record.step,
                replica=replica,
                kind=kind,
                prompts=tuple(dict.fromkeys(part.prompt for part in parts)),
                start_s=self._clock.at(start_s),
                end_s=self._clock.at(end_s),
            )
        )


def _size(sample: Sample) -> float:
    return abs(sample.reward or 0.0)


def share_out(
    groups: Sequence[Group], replicas: Sequence[ReplicaId]
) -> dict[ReplicaId, list[Group]]:
    """Distribute groups evenly by tokens: the longest first, each to the replica with the least.
    Tokens of environments count too, as the model runs them."""
    load = {replica: 0 for replica in replicas}
    shares: dict[ReplicaId, list[Group]] = {}
    for tokens, place in sorted(
        ((sum(len(s.tokens) for s in g.samples), -n) for n, g in enumerate(groups)), reverse=True
    ):
        replica = min(replicas, key=lambda r: (load[r], r))
        load[replica] += tokens
        shares.setdefault(replica, []).append(groups[-place])
    return shares


def _cut(group: Group, part: GroupPart) -> Group:
    return replace(
        group,
        samples=group.samples[part.start : part.stop],
        advantages=group.advantages[part.start : part.stop],
    )
