"""When gradients start, where, and when the tail moves to fewer workers.

Works in every mode: in ``exact`` nothing is discarded, so a group that is complete is final and
its gradients may be summed while the tail still decodes (RollPacker, section 5; ours also moves
the tail). The sum is divided once, at the end, so the update does not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollpacker.config import StreamingConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, GroupPart, PromptId, WorkerId
from rollpacker.policy.tail_release import TailRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingRules:
    """What streaming may do in this run.

    Args:
        stream: gradients may start before the rollout ends.
        consolidate_below: running attempts at which the tail moves to fewer workers; 0 never.
        ordered: gradients are summed in the order in which prompts were started, so that the
            sum is the same to the bit in every run.
        updates: updates of a step; more than one needs all groups first.
        train_all: groups whose advantages are zero have a gradient too (that of a KL term).
        prompts: groups of an update, where a round may have several updates' worth of them.
        tail_workers: of nodes that other jobs share: workers that keep the tail when one of them
            takes the nodes; 0 offers none.
        replica: neighbouring workers that make one training replica; the first of them is given
            its gradient work.
    """

    stream: bool
    consolidate_below: int
    ordered: bool = False
    updates: int = 1
    train_all: bool = False
    replica: int = 1
    prompts: int = 0
    tail_workers: int = 0


_SMALLEST_TASK = 512
"""Tokens below which cutting a task costs more than it balances."""


@dataclass(slots=True)
class _Worker:
    """What one worker is doing."""

    running: set[AttemptId] = field(default_factory=set[AttemptId])
    tasks: int = 0
    """Gradient tasks in flight."""
    parts: list[GroupPart] = field(default_factory=list[GroupPart])
    """What is in this worker's gradient sum or on its way into it."""


class Streaming:
    """Assigns gradient work to workers and frees workers from the tail."""

    def __init__(self, config: StreamingConfig, rules: StreamingRules) -> None:
        self._config = config
        self._rules = rules
        self._step = 0
        self._workers: dict[WorkerId, _Worker] = {}
        self._replicas: dict[WorkerId, tuple[WorkerId, ...]] = {}
        self._engine_of: dict[WorkerId, WorkerId] = {}
        self._at: dict[AttemptId, WorkerId] = {}
        self._tokens: dict[AttemptId, int] = {}
        self._lengths: dict[PromptId, list[int]] = {}
        self._order: dict[PromptId, int] = {}
        self._ready: list[GroupPart] = []
        self._waiting = 0
        self._later: list[list[GroupPart]] = []
        self._next: list[GroupPart] = []
        self._updates = 1
        self._update = 0
        self._rollout_over = False
        self._applying = False
        self._tail = TailRelease(rules.tail_workers)
        self._none_below = 0
        """No worker with fewer tasks than this may train now."""

    def start(self, event: ev.StepStarted) -> None:
        """Begin a step with all workers decoding."""
        self._step = event.step
        self._workers = {worker: _Worker() for worker in event.workers}
        self._engine_of = {}
        size = self._rules.replica
        self._replicas = {
            workers[0]: workers
            for workers in (event.workers[i : i + size] for i in range(0, len(event.workers), size))
        }
        self._at, self._tokens, self._lengths, self._order = {}, {}, {}, {}
        self._ready, self._later, self._next = [], [], []
        self._updates = 1
        self._waiting = 0
        self._update = 0
        self._rollout_over = False
        self._applying = False
        self._none_below = 0
        self._tail.start()

    def observe(self, decision: do.Decision) -> None:
        """Follow what the rollout decided."""
        match decision:
            case do.BeginRound():
                self._updates = decision.updates
            case do.StartAttempt():
                self._workers[decision.worker].running.add(decision.attempt)
                self._at[decision.attempt] = decision.worker
                self._order.setdefault(decision.prompt, len(self._order))
                self._tail.count()
            case do.AbortAttempt():
                self._end(decision.attempt)
            case do.MigrateAttempts():
                for attempt in decision.attempts:
                    self._move(attempt, decision.target)
            case do.RegroupWorkers():
                self._regroup(decision)
            case do.AcceptGroup():
                self._accept(decision)
            case do.FinishRollout():
                self._rollout_over = True
                self._none_below = 0
                self._split_updates()
            case _:
                pass

    def handle(self, event: ev.Event) -> None:
        """Take one event, before the rollout's decisions about it are observed."""
        match event:
            case ev.AttemptFinished():
                self._tokens[event.attempt] = event.tokens
                self._end(event.attempt)
            case ev.AttemptFailed() | ev.AttemptAborted():
                self._end(event.attempt)
            case ev.AttemptMigrated():
                self._move(event.attempt, event.worker)
            case ev.TailReleased():
                self._tail.release()
            case ev.GradientsAccumulated():
                if event.worker in self._replicas:
                    self._workers[event.worker].tasks -= 1
                    self._none_below = 0
            case ev.UpdateApplied():
                self._next_update()
            case ev.WorkerLost():
                self._lose(event.worker)
            case _:
                pass

    @property
    def waiting(self) -> int:
        """Tokens of complete groups whose gradients nobody has begun."""
        return self._waiting

    def decide(self) -> Iterable[do.Decision]:
        """Consolidate the tail, hand out gradients, end the update: whatever is due now."""
        if self._applying:
            return
        if not self._rollout_over:
            if self._rules.tail_workers:
                yield from self._share_tail()
            yield from self._consolidate()
        yield from self._dispatch()
        if self._rollout_over and not self._busy():
            self._applying = True
            yield do.ApplyUpdate(step=self._step, update=self._update, last=not self._later)

    def _busy(self) -> bool:
        return bool(self._ready) or any(worker.tasks for worker in self._workers.values())

    def _accept(self, decision: do.AcceptGroup) -> None:
        counts = decision.informative or self._rules.train_all
        lengths = [self._tokens[attempt] if counts else 0 for attempt in decision.attempts]
        self._lengths[decision.prompt] = lengths
        part = GroupPart(prompt=decision.prompt, start=0, stop=len(lengths))
        if self._updates > 1 and len(self._lengths) > self._rules.prompts:
            self._next.append(part)
            return
        self._ready.append(part)
        self._waiting += sum(lengths)

    def _set_ready(self, parts: list[GroupPart]) -> None:
        self._ready = parts
        self._waiting = sum(map(self._cost, parts))

    def _cost(self, part: GroupPart) -> int:
        """Tokens that have a gradient."""
        return sum(self._lengths[part.prompt][part.start : part.stop])

    def _place(self, part: GroupPart) -> tuple[int, int]:
        return self._order[part.prompt], part.start

    def _end(self, attempt: AttemptId) -> None:
        worker = self._at.pop(attempt, None)
        if worker is not None:
            running = self._workers[worker].running
            running.discard(attempt)
            if not running:
                self._none_below = 0

    def _move(self, attempt: AttemptId, target: WorkerId) -> None:
        if attempt in self._at and target in self._workers:
            self._end(attempt)
            self._at[attempt] = target
            self._workers[target].running.add(attempt)

    def _regroup(self, decision: do.RegroupWorkers) -> None:
        self._none_below = 0
        for member in decision.members:
            self._engine_of[member] = decision.lead

    def _decodes(self, worker: WorkerId) -> bool:
        """Whether its devices decode, for itself or in another worker's engine."""
        lead = self._engine_of.get(worker, worker)
        return lead in self._workers and bool(self._workers[lead].running)

    def _lose(self, worker: WorkerId) -> None:
        """The gradient sum of its replica is gone: others must repeat its groups."""
        self._none_below = 0
        lead = next((one for one, members in self._replicas.items() if worker in members), None)
        if lead is not None:
            del self._replicas[lead]
            self._set_ready([*self._workers[lead].parts, *self._ready])
            self._workers[lead].parts.clear()
            self._workers[lead].tasks = 0
        lost = self._workers.pop(worker, None)
        if lost is not None:
            for attempt in lost.running:
                self._at.pop(attempt, None)

    def _split_updates(self) -> None:
        if self._updates > 1:
            size = self._rules.prompts
            self._later = [self._next[i : i + size] for i in range(0, len(self._next), size)]
            return
        self._ready.sort(key=self._place)
        count = self._rules.updates
        if count > 1 and self._ready:
            size = -(-len(self._ready) // count)
            parts = [self._ready[i : i + size] for i in range(0, len(self._ready), size)]
            self._set_ready(parts[0])
            self._later = parts[1:]

    def _next_update(self) -> None:
        self._applying = False
        for worker in self._workers.values():
            worker.parts.clear()
        self._update += 1
        if self._later:
            self._set_ready(self._later.pop(0))
        else:
            self._applying = True

    def _share_tail(self) -> Iterable[do.Decision]:
        running = {worker: state.running for worker, state in self._workers.items()}
        for decision in list(self._tail.decide(running)):
            if isinstance(decision, do.MigrateAttempts):
                for attempt in decision.attempts:
                    self._move(attempt, decision.target)
            yield decision

    def _consolidate(self) -> Iterable[do.MigrateAttempts]:
        """Free the emptiest decoding worker when the others can take its attempts for free."""
        if not self._rules.stream or len(self._at) > self._rules.consolidate_below:
            return
        if self._waiting < self._config.group_tokens:
            return
        decoding = sorted(
            (w for w, state in self._workers.items() if state.running),
            key=lambda w: (len(self._workers[w].running), -w),
        )
        if len(decoding) < 2:
            return
        source, target = decoding[0], decoding[-1]
        moved = tuple(sorted(self._workers[source].running))
        for attempt in moved:
            self._move(attempt, target)
        yield do.MigrateAttempts(attempts=moved, source=source, target=target)

    def _dispatch(self) -> Iterable[do.AccumulateGradients]:
        if self._rules.ordered:
            if self._rollout_over:
                yield from self._dispatch_in_order()
            return
        if not self._rollout_over and not (self._waiting and self._rules.stream):
            return
        while self._ready:
            if not self._waiting and not self._rollout_over:
                return
            # The last tasks go to workers that have none, or one would end late.
            scarce = self._waiting < 2 * _SMALLEST_TASK * len(self._replicas)
            worker = self._free_worker(1 if scarce else self._config.lookahead)
            if worker is None:
                return
            yield self._assign(worker, self._take())

    def _free_worker(self, most: int) -> WorkerId | None:
        """Of those that may train, the one with the fewest tasks if these are fewer than ``most``.

        Asked at every event: where there was none, there is none until something changes.
        """
        if most <= self._none_below:
            return None
        free = [
            (self._workers[worker].tasks, worker)
            for worker in self._replicas
            if self._workers[worker].tasks < most and self._may_train(worker)
        ]
        if not free:
            self._none_below = most
            return None
        return min(free)[1]

    def _may_train(self, worker: WorkerId) -> bool:
        if self._rollout_over:
            return True
        if self._tail.released or not self._rules.stream:
            return False
        return not any(map(self._decodes, self._replicas[worker]))

    def _dispatch_in_order(self) -> Iterable[do.AccumulateGradients]:
        """A fixed share for each worker: the k-th group goes to worker k modulo workers."""
        workers = sorted(self._replicas)
        for place, worker in enumerate(workers):
            share = tuple(self._ready[place :: len(workers)])
            if share:
                yield self._assign(worker, share)
        self._set_ready([])

    def _assign(self, worker: WorkerId, parts: tuple[GroupPart, ...]) -> do.AccumulateGradients:
        self._workers[worker].tasks += 1
        self._workers[worker].parts.extend(parts)
        return do.AccumulateGradients(worker=worker, parts=parts)

    def _take(self) -> tuple[GroupPart, ...]:
        """The next task: small groups together, large ones cut; the largest go first.

        Tasks shrink with what is left, so that all workers end together (guided
        self-scheduling).
        """
        self._ready.sort(key=lambda part: (-self._cost(part), self._place(part)))
        share = max(_SMALLEST_TASK, self._waiting // (2 * len(self._replicas)))
        budget = min(self._config.group_tokens, share)
        self._cut_first(budget)
        taken = [self._ready.pop(0)]
        tokens = self._cost(taken[0])
        while self._ready and tokens + self._cost(self._ready[0]) <= budget:
            tokens += self._cost(self._ready[0])
            taken.append(self._ready.pop(0))
        self._waiting -= tokens
        return tuple(taken)

    def _cut_first(self, budget: int) -> None:
        """Cut the first part where it reaches ``budget`` tokens, between samples."""
        first = self._ready[0]
        tokens = 0
        for place in range(first.start, first.stop - 1):
            tokens += self._lengths[first.prompt][place]
            if tokens >= budget:
                head = GroupPart(prompt=first.prompt, start=first.start, stop=place + 1)
                rest = GroupPart(prompt=first.prompt, start=place + 1, stop=first.stop)
                self._ready[0:1] = [head, rest]
                return
