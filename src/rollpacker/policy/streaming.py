"""When and where gradients start, when updates are made and published, and who gets a tail's nodes.

``exact`` discards nothing, so a complete group is final and its gradients may be summed while the
tail still decodes (RollPacker, section 5). The sum is divided once, at the end, so the update does
not change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, GroupPart, PromptId, ReplicaId
from rollpacker.policy.engines.fleet import by_number
from rollpacker.policy.ledger import Ledger
from rollpacker.policy.settings import RolloutSettings

TAIL_AT = 0.8  # share of finished responses at which the nodes are offered


class TailRelease:
    """Offers the nodes once per round, and clears them when another job takes them. This is
    RollMux's long-tail migration, at about 80% of the responses, to a quarter of the engines. The
    tail keeps ``keep`` engines. 0 offers nothing."""

    def __init__(self, keep: int, ledger: Ledger) -> None:
        self._keep = keep
        self._ledger = ledger
        self.start()

    def start(self) -> None:
        self._offered = False
        self.released = False  # True: freed engines have no node until the rollout is over

    def release(self) -> None:
        self.released = self._keep > 0

    def decide(self) -> Iterator[do.OfferTail | do.MigrateAttempts]:
        left = len(self._ledger.running)
        if not self._keep or not left:
            return
        if self.released:
            if self._ledger.busy > self._keep:
                yield from self._moves(self._ledger.by_engine())
        elif not self._offered and left <= (1.0 - TAIL_AT) * len(self._ledger.attempts):
            self._offered = True
            yield do.OfferTail()

    def _moves(
        self, decoding: Mapping[EngineId, tuple[AttemptId, ...]]
    ) -> Iterator[do.MigrateAttempts]:
        fullest = sorted(decoding, key=lambda engine: (-len(decoding[engine]), engine))
        load = {engine: len(decoding[engine]) for engine in fullest[: self._keep]}
        for source in fullest[self._keep :]:
            target = min(load, key=lambda engine: (load[engine], engine))
            load[target] += len(decoding[source])
            yield do.MigrateAttempts(attempts=decoding[source], source=source, target=target)


_SMALLEST_TASK = 512  # tokens below which cutting a task costs more than it balances

_LARGER = 8
"""Factor for tasks once no device waits to be freed, as each ends with a micro-batch that is not
full. The bound lets a worker stop within seconds."""


@dataclass(slots=True)
class _Sum:
    tasks: int = 0
    parts: list[GroupPart] = field(default_factory=list[GroupPart])


_Ready = tuple[int, int, int, int, PromptId]  # rank, place, start, stop and prompt of a part


def _part(ready: _Ready) -> GroupPart:
    return GroupPart(prompt=ready[4], start=ready[2], stop=ready[3])


class Streaming:
    """Assigns gradient work to replicas, and clears the nodes that another job takes."""

    def __init__(self, settings: RolloutSettings, ledger: Ledger) -> None:
        self._config = settings.rollout.streaming
        self._rules = settings.rules
        self._draws = settings.rollout.dynamic_sampling.enabled
        self._ledger = ledger
        self._tail = TailRelease(settings.rules.tail_engines, ledger)
        self._begin((), ())

    def start(self, event: ev.StepStarted) -> None:
        self._begin(event.engines, event.replicas)

    def _begin(self, engines: tuple[EngineId, ...], replicas: tuple[ReplicaId, ...]) -> None:
        rules = self._rules
        self._fleet = by_number(rules.layout, engines, replicas, rules.replica_engines)
        self._sums = {replica: _Sum() for replica in replicas}
        self._tasks = 0
        self._free: list[tuple[int, ReplicaId]] = []  # heap of possibly free replicas by tasks
        self._looked = 0
        self._look_at_all()
        beside = self._fleet.beside if rules.turns else {}
        # Engines on a replica's devices that use its memory.
        self._awake = {replica: {*beside.get(replica, ())} for replica in replicas}
        self._lying_down: set[EngineId] = set()
        self._tired: list[EngineId] = []  # engines that get a decision to sleep
        # Tokens with a gradient of a kept group's first 0, 1, ... samples.
        self._reach: dict[PromptId, list[int]] = {}
        self._ready: list[_Ready] = []
        self.waiting = 0  # tokens of complete groups that no gradient task has
        self._later: list[list[GroupPart]] = []
        self._next: list[GroupPart] = []
        self._update = 0
        self._rollout_over = False
        self._applying = self._updated = self._over = False
        self._tail.start()

    # Events and decisions ---------------------------------------------------------------------

    def release_tail(self, _event: ev.TailReleased) -> None:
        self._tail.release()

    def accumulated(self, event: ev.GradientsAccumulated) -> None:
        replica = self._sums.get(event.replica)
        if replica is not None:
            replica.tasks -= 1
            self._tasks -= 1
            heappush(self._free, (replica.tasks, event.replica))

    def slept(self, event: ev.EngineSlept) -> None:
        self._asleep(event.engine)

    def _asleep(self, engine: EngineId) -> None:
        self._lying_down.discard(engine)
        for replica in self._fleet.on.get(engine, ()):
            awake = self._awake[replica]
            if engine in awake:
                awake.discard(engine)
                if replica in self._sums:
                    heappush(self._free, (self._sums[replica].tasks, replica))

    def woke(self, event: ev.EngineFormed) -> None:
        """Mark an engine as awake when it decodes for a lost one."""
        if self._rules.turns:
            for replica in self._fleet.on.get(event.engine, ()):
                self._awake[replica].add(event.engine)

    def applied(self, _event: ev.UpdateApplied) -> None:
        for replica in self._sums.values():
            replica.parts.clear()
        self._update += 1
        self._applying = False
        if self._later:
            self._set_ready(self._later.pop(0))
        else:
            self._updated = self._over = True

    def lose(self, event: ev.DevicesLost) -> None:
        """Repeat the groups in lost gradient sums on other replicas, if the update has changed no
        weight yet."""
        for engine in event.engines:
            self._asleep(engine)
        if any(one in self._sums for one in event.replicas):
            self._applying = False
        for lost in (self._sums.pop(one) for one in event.replicas if one in self._sums):
            self._tasks -= lost.tasks
            self._set_ready([*lost.parts, *self._parts()])

    def accept(self, decision: do.AcceptGroup) -> None:
        kept = self._ledger.kept
        counts = decision.informative or self._rules.train_all
        lengths = [attempt.tokens if counts else 0 for attempt in kept[decision.prompt]]
        self._reach[decision.prompt] = list(accumulate(lengths, initial=0))
        part = GroupPart(prompt=decision.prompt, start=0, stop=len(lengths))
        if self._ledger.updates > 1 and len(kept) > self._rules.prompts:
            self._next.append(part)
            return
        self._add(part)
        self.waiting += sum(lengths)

    def finish(self, _decision: do.FinishRollout) -> None:
        self._rollout_over = True
        self._look_at_all()
        for replica in self._sums if self._reach else ():
            self._rest(replica)
        size = self._rules.prompts
        if self._ledger.updates > 1:
            self._later = [self._next[i : i + size] for i in range(0, len(self._next), size)]
            return
        parts = sorted(self._parts(), key=self._place)
        size = -(-len(parts) // self._rules.updates) or 1
        self._set_ready(parts[:size])
        self._later = [parts[i : i + size] for i in range(size, len(parts), size)]

    @property
    def wanted(self) -> int:
        """Tokens for which freed devices would compute gradients now."""
        return 0 if self._tail.released else self.waiting

    # Decisions that are due -------------------------------------------------------------------

    def decide(self) -> Iterable[do.Decision]:
        if self._updated:
            self._updated = False
            yield do.PublishWeights(version=self._ledger.step + 1)
        if self._applying or self._over:
            return
        if not self._rollout_over:
            yield from self._tail.decide()
        yield from self._dispatch()
        yield from (do.SleepEngine(engine=engine) for engine in self._tired)
        self._tired.clear()
        idle = not (self._ready or self._tasks or self._lying_down)
        if self._rollout_over and idle:
            self._applying = True
            yield do.ApplyUpdate(step=self._ledger.step, update=self._update, last=not self._later)

    def _dispatch(self) -> Iterable[do.AccumulateGradients]:
        if self._rules.ordered:
            if self._rollout_over:
                yield from self._dispatch_in_order()
            return
        if not self._rollout_over and not (self.waiting and self._rules.stream):
            return
        while self._ready:
            if not self.waiting and not self._rollout_over:
                return
            # The last tasks go to idle replicas only, so that none ends late.
            scarce = self.waiting < 2 * _SMALLEST_TASK * len(self._sums)
            replica = self._idlest(1 if scarce else self._config.lookahead)
            if replica is None:
                return
            yield self._assign(replica, self._take())

    def _may_train(self, replica: ReplicaId) -> bool:
        if self._rollout_over:
            return True
        if self._tail.released or not self._rules.stream:
            return False
        if self._awake[replica] and (self._draws or not self._ledger.busy):
            return False  # an engine that may be given another prompt stays awake
        return not any(map(self._ledger.decodes, self._fleet.beside[replica]))

    def _look_at_all(self) -> None:
        self._free = sorted((known.tasks, replica) for replica, known in self._sums.items())

    def _idlest(self, most: int) -> ReplicaId | None:
        """The replica that may train with the fewest tasks, if these are fewer than ``most``."""
        idled = self._ledger.idled
        while self._looked < len(idled):
            for replica in self._fleet.on.get(idled[self._looked], ()):
                if replica in self._sums:
                    heappush(self._free, (self._sums[replica].tasks, replica))
            self._looked += 1
        while self._free:
            tasks, replica = self._free[0]
            known = self._sums.get(replica)
            if known is not None and tasks == known.tasks and self._may_train(replica):
                if not self._awake[replica]:
                    return replica if tasks < most else None
                self._rest(replica)
            heappop(self._free)
        return None

    def _rest(self, replica: ReplicaId) -> None:
        tired = sorted(self._awake[replica] - self._lying_down)
        self._lying_down.update(tired)
        self._tired += tired

    def _dispatch_in_order(self) -> Iterable[do.AccumulateGradients]:
        parts = self._parts()
        self._set_ready([])
        replicas = sorted(self._sums)
        for place, replica in enumerate(replicas):
            share = tuple(parts[place :: len(replicas)])
            if share:
                yield self._assign(replica, share)

    def _assign(self, replica: ReplicaId, parts: tuple[GroupPart, ...]) -> do.AccumulateGradients:
        known = self._sums[replica]
        known.tasks += 1
        known.parts.extend(parts)
        self._tasks += 1
        heappush(self._free, (known.tasks, replica))
        return do.AccumulateGradients(replica=replica, parts=parts)

    # Waiting parts ----------------------------------------------------------------------------

    def _parts(self) -> list[GroupPart]:
        return list(map(_part, self._ready))

    def _set_ready(self, parts: list[GroupPart]) -> None:
        self._ready = []
        for part in parts:
            self._add(part)
        self.waiting = sum(map(self._cost, parts))

    def _add(self, part: GroupPart) -> None:
        place = self._place(part)[0]
        rank = len(self._ready) if self._rules.ordered else -self._cost(part)
        heappush(self._ready, (rank, place, part.start, part.stop, part.prompt))

    def _cost(self, part: GroupPart) -> int:
        reach = self._reach[part.prompt]
        return reach[part.stop] - reach[part.start]

    def _place(self, part: GroupPart) -> tuple[int, int]:
        return self._ledger.groups[part.prompt][0].place, part.start

    def _take(self) -> tuple[GroupPart, ...]:
        """The next task: small groups together, large ones cut, the largest first. Tasks shrink
        with the waiting work, so that all replicas end together (guided self-scheduling)."""
        share = max(_SMALLEST_TASK, self.waiting // (2 * len(self._sums)))
        most = self._rules.task_tokens * (_LARGER if self._rollout_over else 1)
        budget = min(most, share)
        first = self._cut(_part(heappop(self._ready)), budget)
        taken = [first]
        tokens = self._cost(first)
        while self._ready and tokens - self._ready[0][0] <= budget:
            tokens -= self._ready[0][0]
            taken.append(_part(heappop(self._ready)))
        self.waiting -= tokens
        return tuple(taken)

    def _cut(self, part: GroupPart, budget: int) -> GroupPart:
        reach = self._reach[part.prompt]
        stop = bisect_left(reach, reach[part.start] + budget, part.start + 1, part.stop)
        if stop == part.stop:
            return part
        self._add(GroupPart(prompt=part.prompt, start=stop, stop=part.stop))
        return GroupPart(prompt=part.prompt, start=part.start, stop=stop)
