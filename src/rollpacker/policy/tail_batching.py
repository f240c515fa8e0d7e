"""Tail batching: short rounds race, losers wait for a long round (RollPacker, section 3).

The same machine runs plain synchronous rounds: a full round is one in which nothing races.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, Prompt, PromptId, RoundKind, WorkerId
from rollpacker.policy.buckets import Buckets, Predict
from rollpacker.policy.placement import Placement
from rollpacker.policy.race import Race
from rollpacker.policy.rounds import Racing, RoundPlan, domain_quotas, plan_round

NO_VARIANCE = "no reward variance"
"""Why dynamic sampling drops a group."""


Engines = Callable[[RoundKind, tuple[WorkerId, ...]], Sequence[WorkerId]]
"""Which of the live workers run an engine in a round of this kind."""


def every_worker(kind: RoundKind, workers: tuple[WorkerId, ...]) -> Sequence[WorkerId]:
    """Each has an engine of its own."""
    del kind
    return workers


@dataclass(slots=True)
class _Round:
    """State of the round in progress."""

    step: int
    plan: RoundPlan
    races: dict[PromptId, Race] = field(default_factory=dict[PromptId, Race])
    owner: dict[AttemptId, Race] = field(default_factory=dict[AttemptId, Race])
    audited: list[Race] = field(default_factory=list[Race])
    aborting: set[AttemptId] = field(default_factory=set[AttemptId])
    accepted: dict[str, int] = field(default_factory=dict[str, int])
    waiting_for_prompts: bool = False
    draws: int = 0
    finished: bool = False

    def done(self) -> bool:
        """Every race is decided and every told-to-stop attempt has stopped."""
        if self.aborting or self.waiting_for_prompts:
            return False
        return not any(
            not race.done or race.decoding or race.waiting or race.grading
            for race in self.races.values()
        )


class TailBatching:
    """Which prompts and attempts a step runs, which it keeps, and which wait.

    Args:
        config: the rollout's configuration.
        sizes: prompts of each domain in the data.
        asynchronous_grading: grade each response when it finishes, else all at the end.
        predict: expected lengths, for length-bucketed rounds.
        engines: which workers run an engine in a round.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sizes: Mapping[str, int],
        *,
        asynchronous_grading: bool,
        predict: Predict,
        engines: Engines = every_worker,
    ) -> None:
        self._config = config
        self._engines = engines
        self._sizes = dict(sizes)
        self._asynchronous = asynchronous_grading
        self._next_attempt = 0
        self.queue: deque[Prompt] = deque()
        tail = config.tail_batching
        self._buckets = Buckets(tail.bucket_rounds if tail.mode == "exact" else 1, predict)
        self._placement = Placement(())
        self._remaining: dict[str, int] = {}
        self._audits = 0
        self._round: _Round | None = None

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {
            "next_attempt": self._next_attempt,
            "queue": [asdict(prompt) for prompt in self.queue],
            "buckets": self._buckets.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._next_attempt = state["next_attempt"]
        self.queue = deque(Prompt(**item) for item in state["queue"])
        self._buckets.load_state_dict(state["buckets"])

    @property
    def held(self) -> int:
        """Prompts that were drawn and wait for a later round."""
        return len(self.queue) + sum(self._buckets.held().values())

    def audited(self) -> list[Race]:
        """Prompts of this round that run without aborts."""
        return [] if self._round is None else self._round.audited

    def retire(self, worker: WorkerId) -> None:
        """A worker runs no engine for the rest of the round."""
        self._placement.retire(worker)

    def start(
        self, event: ev.StepStarted, racing: Racing, audits: int = 0
    ) -> Iterable[do.Decision]:
        """Begin a step; ``audits`` prompts of a short round run without aborts."""
        assert self._round is None or self._round.finished, "the last round is not over"
        self._remaining = dict(event.remaining)
        held = self._buckets.held()
        plan = plan_round(
            prompts=self._config.prompts_per_step,
            responses=self._config.num_generations,
            racing=racing,
            queued=len(self.queue),
            sizes=self._sizes,
            remaining={d: count + held.get(d, 0) for d, count in event.remaining.items()},
            long_steps=self._config.tail_batching.long_round_steps,
        )
        self._placement = Placement(self._engines(plan.kind, event.workers))
        self._round = _Round(step=event.step, plan=plan)
        self._audits = audits if plan.kind is RoundKind.SHORT else 0
        yield do.BeginRound(step=event.step, round=plan.kind, updates=plan.updates)
        queued = [self.queue.popleft() for _ in range(plan.queued)]
        yield from self._start_prompts(self._round, queued)
        missing = self._buckets.missing(plan.draws, event.remaining)
        if missing:
            yield self._draw(self._round, missing)
        else:
            yield from self._start_prompts(self._round, self._buckets.take(plan.draws))

    def handle(self, event: ev.Event) -> Iterable[do.Decision]:
        """Take one event of the round in progress."""
        if isinstance(event, ev.EpochEnded):
            self.queue.clear()
            self._buckets.clear()
        current = self._round
        if current is None or current.finished:
            return
        match event:
            case ev.PromptsDrawn():
                yield from self._start_drawn(current, event.prompts)
            case ev.AttemptFinished():
                yield from self._finish_attempt(current, event.attempt)
            case ev.AttemptGraded():
                yield from self._grade(current, event)
            case ev.AttemptAborted():
                current.aborting.discard(event.attempt)
            case ev.AttemptFailed() | ev.GradingFailed():
                yield from self._retry(current, event)
            case ev.AttemptMigrated():
                self._placement.moved(event.attempt, event.worker)
            case ev.WorkerLost():
                yield from self._restart(current, event.worker)
            case _:
                return
        yield from self._settle(current)

    def _settle(self, current: _Round) -> Iterable[do.Decision]:
        if not self._asynchronous:
            yield from self._grade_all(current)
        if self._config.dynamic_sampling.enabled:
            yield from self._top_up(current)
        if current.done():
            current.finished = True
            yield do.FinishRollout(step=current.step, round=current.plan.kind)

    def _draw(self, current: _Round, counts: dict[str, int]) -> do.DrawPrompts:
        current.waiting_for_prompts = True
        for domain, count in counts.items():
            self._remaining[domain] -= count
        return do.DrawPrompts(counts=counts)

    def _start_drawn(self, current: _Round, prompts: Sequence[Prompt]) -> Iterable[do.StartAttempt]:
        current.waiting_for_prompts = False
        if current.draws == 0:
            self._buckets.add(prompts, current.plan.draws, current.step)
            prompts = self._buckets.take(current.plan.draws)
        yield from self._start_prompts(current, prompts)

    def _start_prompts(
        self, current: _Round, prompts: Sequence[Prompt]
    ) -> Iterable[do.StartAttempt]:
        whole_groups = len(prompts) >= self._placement.workers
        for prompt in prompts:
            race = Race(prompt, wanted=self._config.num_generations, audit=self._audits > 0)
            if race.audit:
                self._audits -= 1
                current.audited.append(race)
            current.races[prompt.id] = race
            worker = self._placement.choose() if whole_groups else None
            for _ in range(current.plan.responses):
                yield self._start(current, race, race.next_index, worker)
                race.next_index += 1

    def _start(
        self, current: _Round, race: Race, index: int, worker: WorkerId | None = None
    ) -> do.StartAttempt:
        attempt = AttemptId(self._next_attempt)
        self._next_attempt += 1
        race.decoding[attempt] = index
        current.owner[attempt] = race
        chosen = self._placement.choose() if worker is None else worker
        self._placement.started(attempt, chosen)
        return do.StartAttempt(attempt=attempt, prompt=race.prompt.id, index=index, worker=chosen)

    def _finish_attempt(self, current: _Round, attempt: AttemptId) -> Iterable[do.Decision]:
        race = current.owner.get(attempt)
        if race is None or attempt not in race.decoding:
            return
        self._placement.ended(attempt)
        index = race.decoding.pop(attempt)
        if race.done:
            return
        if self._asynchronous:
            race.grading[attempt] = index
            yield do.GradeAttempt(attempt=attempt)
        else:
            race.waiting[attempt] = index

    def _grade_all(self, current: _Round) -> Iterable[do.GradeAttempt]:
        """Synchronous grading: when nothing decodes any more, everything is graded."""
        if current.waiting_for_prompts or any(race.decoding for race in current.races.values()):
            return
        for race in current.races.values():
            for attempt in sorted(race.waiting):
                race.grading[attempt] = race.waiting.pop(attempt)
                yield do.GradeAttempt(attempt=attempt)

    def _grade(self, current: _Round, event: ev.AttemptGraded) -> Iterable[do.Decision]:
        race = current.owner.get(event.attempt)
        if race is None or event.attempt not in race.grading:
            return
        index = race.grading.pop(event.attempt)
        if race.done:
            return
        race.graded[event.attempt] = (index, event.reward)
        if race.complete:
            yield from self._complete(current, race)

    def _complete(self, current: _Round, race: Race) -> Iterable[do.Decision]:
        race.done = True
        if not race.audit:
            yield from self._abort(current, race)
        informative = race.informative(self._config.min_reward_range)
        if self._config.dynamic_sampling.enabled and not informative:
            yield do.DropGroup(prompt=race.prompt.id, attempts=race.kept(), reason=NO_VARIANCE)
            return
        yield do.AcceptGroup(prompt=race.prompt.id, attempts=race.kept(), informative=informative)
        domain = race.prompt.domain
        current.accepted[domain] = current.accepted.get(domain, 0) + 1
        if self._config.dynamic_sampling.enabled:
            if sum(current.accepted.values()) == self._config.prompts_per_step:
                yield from self._close(current, list(current.races.values()))
        elif current.accepted[domain] == current.plan.quotas.get(domain):
            rivals = [r for r in current.races.values() if r.prompt.domain == domain]
            yield from self._close(current, rivals)

    def _close(self, current: _Round, races: Sequence[Race]) -> Iterable[do.Decision]:
        """All groups are there: the prompts that are not done have lost."""
        for race in races:
            if race.done:
                continue
            race.done = True
            if not race.audit:
                yield from self._abort(current, race)
            self.queue.append(race.prompt)
            yield do.DeferPrompt(prompt=race.prompt)

    def _abort(self, current: _Round, race: Race) -> Iterable[do.AbortAttempt]:
        for attempt in race.live:
            race.forget(attempt)
            current.owner.pop(attempt)
            current.aborting.add(attempt)
            self._placement.ended(attempt)
            yield do.AbortAttempt(attempt=attempt)

    def _retry(
        self, current: _Round, event: ev.AttemptFailed | ev.GradingFailed
    ) -> Iterable[do.Decision]:
        """Replace an attempt: the same sample if its engine failed, another if its reward did."""
        attempt = event.attempt
        race = current.owner.pop(attempt, None)
        current.aborting.discard(attempt)
        if race is None:
            return
        self._placement.ended(attempt)
        index = race.forget(attempt)
        if race.done or index is None:
            return
        race.failures += 1
        if race.failures <= self._config.max_retries * self._config.num_generations:
            if isinstance(event, ev.GradingFailed):
                index, race.next_index = race.next_index, race.next_index + 1
            yield self._start(current, race, index)
            return
        yield from self._shrink(current, race, event.error)

    def _shrink(self, current: _Round, race: Race, error: str) -> Iterable[do.Decision]:
        """A response cannot be had: the group goes on with fewer, and ends when too few remain."""
        race.wanted = min(race.wanted, len(race.graded) + len(race.live))
        if race.wanted < min(2, self._config.num_generations):
            race.done = True
            yield from self._abort(current, race)
            yield do.DropGroup(prompt=race.prompt.id, attempts=(), reason=error)
        elif race.complete:
            yield from self._complete(current, race)

    def _restart(self, current: _Round, worker: WorkerId) -> Iterable[do.Decision]:
        lost = self._placement.lose(worker)
        for attempt in lost:
            race = current.owner.pop(attempt)
            index = race.decoding.pop(attempt)
            if not race.done or race.audit:
                yield self._start(current, race, index)

    def _top_up(self, current: _Round) -> Iterable[do.Decision]:
        """Dynamic sampling: draw again when the prompts in play cannot fill the quotas."""
        if current.waiting_for_prompts:
            return
        accepted = sum(current.accepted.values())
        open_ = sum(not race.done for race in current.races.values())
        missing = self._config.prompts_per_step - accepted - open_
        if missing <= 0 or current.draws >= self._config.dynamic_sampling.max_draws:
            return
        counts = domain_quotas(missing, self._sizes, self._remaining)
        if counts:
            current.draws += 1
            yield self._draw(current, counts)
