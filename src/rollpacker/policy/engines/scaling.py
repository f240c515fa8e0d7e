"""When a part of the rollout's devices is freed for gradients, and where its requests go.

``Halving`` is the paper's rule (RollPacker, section 4.4, Algorithm 1), which checks that the
remaining devices can hold the requests. It is also the fixed rule of the artifact, which does not.
Ours is ``Consolidation``. None takes devices back within a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollpacker.core.types import AttemptId, Device, EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Fleet, cheapest_half
from rollpacker.policy.engines.hardware import EngineProfile, Tokens
from rollpacker.policy.lengths import KaplanMeier


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAttempt:
    """A response that is not finished. ``engine`` is where it runs, or will after a move."""

    attempt: AttemptId
    prompt_tokens: int
    generated: int
    engine: EngineId

    @property
    def context(self) -> int:
        """Tokens with KV, which a move computes again."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """Fewer devices decode from now on.

    Args:
        freed: engines that stop decoding. ``Fleet.trainable`` gives the replicas that can train.
        moves: new engine of every attempt that moves. It may be its own engine, if that one's group
            changes, so that its KV is computed again.
        tp: devices of each group that goes on decoding.
        groups: engines that become one group, by the engine that runs it. Empty if groups stay.
    """

    freed: tuple[EngineId, ...]
    moves: dict[AttemptId, EngineId]
    tp: int
    groups: dict[EngineId, tuple[EngineId, ...]] = field(
        default_factory=dict[EngineId, tuple[EngineId, ...]]
    )


class Scaling(ABC):
    """A rule that frees devices within one round at a time."""

    _fleet: Fleet | None = None
    _lengths: KaplanMeier | None = None

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        self._fleet, self._lengths = fleet, lengths

    def observe(
        self,
        finished: float,
        running: int,
        active: Callable[[], Sequence[ActiveAttempt]],
        gradient_tokens: int,
        now: float,
    ) -> ScaleDecision | None:
        """Take the state of the round, whenever an attempt has ended. ``finished`` is the share of
        finished requests, and ``running`` the number of others. ``active`` describes them, for
        rules that need more than counts. ``gradient_tokens`` of finished groups wait for
        devices."""
        if self._fleet is None or not running:
            return None
        if not self._due(finished, running, gradient_tokens, now):
            return None
        return self._decide(self._fleet, active(), gradient_tokens, now)

    @abstractmethod
    def _due(self, finished: float, running: int, gradient_tokens: int, now: float) -> bool: ...

    @abstractmethod
    def _decide(
        self, fleet: Fleet, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None: ...

    def lose(self, engine: EngineId) -> None:
        self._fleet = self._fleet and self._fleet.without(engine)

    def lose_replicas(self, replicas: Collection[ReplicaId]) -> None:
        if self._fleet is not None:
            self._fleet = self._fleet.training(self._fleet.replicas.keys() - replicas)


def remaining_tokens(lengths: KaplanMeier, active: Sequence[ActiveAttempt]) -> Tokens:
    """A likely number of remaining tokens of each attempt, at least 1, shape (N,).

    The attempts are spread evenly over the quantiles of the remaining distribution (van der
    Corput's sequence). So their longest is as long as that of a random draw, which means would
    hide.
    """
    generated = np.array([one.generated for one in active], np.int64)
    place = np.argsort(np.argsort(np.array([one.attempt for one in active], np.int64)))
    share = np.array([_radical_inverse(rank + 1) for rank in place.tolist()])
    wanted = (1.0 - share) * lengths.at(generated)
    ends = np.searchsorted(-lengths.survival, -wanted, side="left")
    return np.maximum(1, ends.astype(np.int64) - generated)


def _radical_inverse(n: int) -> float:
    return int(f"{n:b}"[::-1], 2) / (1 << n.bit_length())


def peak_tokens(contexts: Tokens, remaining: Tokens) -> int:
    """Most KV tokens in use at once by attempts that start with ``contexts`` and grow."""
    order = np.argsort(-remaining, kind="stable")
    alive = np.cumsum(contexts[order]) + remaining[order] * np.arange(1, order.size + 1)
    return int(alive.max(initial=0))


def spread(
    moved: Iterable[ActiveAttempt], loads: Mapping[EngineId, int]
) -> dict[AttemptId, EngineId]:
    """Longest first, each to the engine with the fewest tokens (Graham, 1969)."""
    load = dict(loads)
    found: dict[AttemptId, EngineId] = {}
    for one in sorted(moved, key=lambda one: (-one.context, one.attempt)):
        target = min(load, key=lambda engine: (load[engine], engine))
        load[target] += one.context
        found[one.attempt] = target
    return found


def halve(fleet: Fleet, active: Sequence[ActiveAttempt]) -> ScaleDecision | None:
    """Free the cheapest half, and move its requests to the others. None if no half can be freed."""
    by_engine: dict[EngineId, list[ActiveAttempt]] = {engine: [] for engine in fleet.engines}
    for one in active:
        if one.engine in by_engine:  # without those of dead engines
            by_engine[one.engine].append(one)
    loads = {engine: sum(one.context for one in mine) for engine, mine in by_engine.items()}
    freed = cheapest_half(fleet, loads)
    if freed is None:
        return None
    kept = {engine: load for engine, load in loads.items() if engine not in freed}
    moved = [one for engine in freed for one in by_engine[engine]]
    return ScaleDecision(freed=freed, moves=spread(moved, kept), tp=fleet.tp)


_EVERY = 0.05  # share of finished requests between two checks
_HEADROOM = 0.95  # share of the KV that the predicted peak may take after a move
_ROUNDING = 1e-9


class Halving(Scaling):
    """Frees half of the devices, once per round, between the shares ``first`` and ``last`` of
    finished requests. With ``kv_tokens`` (of a group by its devices) it waits until the other half
    can hold the rest, which needs known lengths. Without it, it does not check."""

    def __init__(
        self,
        kv_tokens: Callable[[int], float] | None = None,
        first: float = 0.2,
        last: float = 0.5,
    ) -> None:
        self._kv_tokens = kv_tokens
        self._first, self._last = first, last
        self._done = False
        self._tried = -1

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        super().begin(fleet, lengths)
        self._done, self._tried = False, -1

    def _due(self, finished: float, running: int, gradient_tokens: int, now: float) -> bool:
        del running, gradient_tokens, now
        if self._done or (self._lengths is None and self._kv_tokens is not None):
            return False
        if not self._first - _ROUNDING <= finished <= self._last + _ROUNDING:
            return False
        mark = int((finished - self._first) / _EVERY + _ROUNDING)
        due = mark > self._tried
        self._tried = max(mark, self._tried)
        return due

    def _decide(
        self, fleet: Fleet, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        del gradient_tokens, now
        decision = halve(fleet, active)
        self._done = decision is not None and self._fits(active, decision)
        return decision if self._done else None

    def _fits(self, active: Sequence[ActiveAttempt], decision: ScaleDecision) -> bool:
        if self._kv_tokens is None:
            return True
        assert self._lengths is not None
        remaining = remaining_tokens(self._lengths, active)
        contexts = np.array([one.context for one in active], np.int64)
        targets = np.array([decision.moves.get(one.attempt, one.engine) for one in active])
        most = _HEADROOM * self._kv_tokens(decision.tp)
        return all(
            peak_tokens(contexts[targets == engine], remaining[targets == engine]) <= most
            for engine in set(targets.tolist())
        )


_BELOW = 128
"""Running attempts below which moves are considered. In simulations, thresholds above about 64 gave
the same times, and 32 or fewer were too late."""
_MARGIN = 0.05  # share of the rest of the step that a move must save
_RECHECK = 0.75  # share of the last check's attempts that must be left for the next one


@dataclass(frozen=True, slots=True)
class _Group:
    devices: tuple[Device, ...]
    members: tuple[EngineId, ...]


_Groups = dict[EngineId, _Group]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to run the rest: whether its groups differ, seconds until the step's last gradient is
    summed, and those of them before the first token after the move."""

    tp: int
    groups: _Groups
    moves: dict[AttemptId, EngineId]
    merged: bool
    seconds: float
    moving: float


class Consolidation(Scaling):
    """Compares the rest of the step on the present groups and on fewer or larger ones. Groups that
    a round has left are never taken back. ``profiles`` are engines by tensor-parallel size,
    ``train_token_s`` device-seconds of gradient per token."""

    def __init__(self, profiles: Mapping[int, EngineProfile], train_token_s: float) -> None:
        self._profiles = profiles
        self._train_token_s = train_token_s
        self._start({}, 1)

    def _start(self, groups: _Groups, tp: int) -> None:
        self._groups = groups
        self._tp = tp
        self._looked: int | None = None
        self._until = -np.inf

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        super().begin(fleet, lengths)
        groups = {
            engine: _Group(tuple(sorted(fleet.engines[engine])), (engine,))
            for engine in sorted(fleet.engines)
        }
        self._start(groups, fleet.tp)

    def _decide(
        self, fleet: Fleet, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        assert self._lengths is not None
        # Attempts of a dead group come back under new ids.
        present = (one for one in active if one.engine in self._groups)
        ordered = sorted(present, key=lambda one: one.attempt)
        if not ordered:
            return None
        view = _View(
            profiles=self._profiles,
            fleet=fleet,
            active=ordered,
            remaining=remaining_tokens(self._lengths, ordered),
            work=gradient_tokens * self._train_token_s,
        )
        stay = view.stay(self._groups, self._tp)
        # Fewer engines of the same size decode no faster, so only gradient work can be saved.
        least = _MARGIN * stay.seconds * len(fleet.devices)
        if view.work <= least and not self._grows:
            return None
        plans = list(view.plans(self._groups, self._tp))
        best = min(plans, key=lambda plan: plan.seconds, default=stay)
        if best.seconds >= (1.0 - _MARGIN) * stay.seconds:
            return None
        return self._follow(best, now)

    @property
    def _grows(self) -> bool:
        return max(self._profiles) > self._tp

    def _due(self, finished: float, running: int, gradient_tokens: int, now: float) -> bool:
        del finished
        if not gradient_tokens and not self._grows:
            return False
        if self._lengths is None or running > _BELOW or now < self._until:
            return False
        if self._looked is not None and running > _RECHECK * self._looked:
            return False
        self._looked = running
        return True

    def _follow(self, plan: _Plan, now: float) -> ScaleDecision:
        kept = {member for group in plan.groups.values() for member in group.members}
        before = [member for group in self._groups.values() for member in group.members]
        self._groups, self._tp = plan.groups, plan.tp
        self._until = now + plan.moving
        groups = {lead: group.members for lead, group in plan.groups.items()}
        return ScaleDecision(
            freed=tuple(sorted(engine for engine in before if engine not in kept)),
            moves=plan.moves,
            tp=plan.tp,
            groups=groups if plan.merged else {},
        )

    def lose(self, engine: EngineId) -> None:
        super().lose(engine)
        self._groups = {
            lead: group for lead, group in self._groups.items() if engine not in group.members
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A moment of a round, and its possible plans. ``remaining`` belongs to ``active``. ``work``
    are device-seconds of waiting gradients."""

    profiles: Mapping[int, EngineProfile]
    fleet: Fleet
    active: Sequence[ActiveAttempt]
    remaining: Tokens
    work: float

    def stay(self, groups: _Groups, tp: int) -> _Plan:
        plan = self._plan(groups, groups, tp, {})
        assert plan is not None
        return plan

    def plans(self, groups: _Groups, tp: int) -> Iterator[_Plan]:
        """Every larger size, and the present one, on 1, 2, 4, … and all groups."""
        for size in sorted(self.profiles):
            if size < tp:
                continue
            blocks = self._ranked(groups if size == tp else _merged(groups, size))
            most = min(len(blocks) - (size == tp), len(self.active))
            for count in sorted({1 << bit for bit in range(most.bit_length())} | {most} - {0}):
                chosen = dict(sorted(blocks[:count]))
                plan = self._plan(groups, chosen, size, self._moves(groups, chosen))
                if plan is not None:
                    yield plan

    def _ranked(self, blocks: _Groups) -> list[tuple[EngineId, _Group]]:
        at: dict[EngineId, int] = {}
        for one in self.active:
            at[one.engine] = at.get(one.engine, 0) + one.context
        load = {
            lead: sum(at.get(member, 0) for member in group.members)
            for lead, group in blocks.items()
        }
        replicas = self.fleet.at
        home = {lead: replicas.get(group.devices[0], lead) for lead, group in blocks.items()}
        total: dict[int, int] = {}
        for lead, replica in home.items():
            total[replica] = total.get(replica, 0) + load[lead]
        return sorted(
            blocks.items(),
            key=lambda pair: (-total[home[pair[0]]], home[pair[0]], -load[pair[0]], pair[0]),
        )

    def _moves(self, groups: _Groups, chosen: _Groups) -> dict[AttemptId, EngineId]:
        stays = {lead for lead, group in chosen.items() if groups.get(lead) == group}
        loads = dict.fromkeys(chosen, 0)
        moved: list[ActiveAttempt] = []
        for one in self.active:
            if one.engine in stays:
                loads[one.engine] += one.context
            else:
                moved.append(one)
        return spread(moved, loads)

    def _plan(
        self, before: _Groups, groups: _Groups, tp: int, moves: dict[AttemptId, EngineId]
    ) -> _Plan | None:
        targets = [moves.get(one.attempt, one.engine) for one in self.active]
        places: dict[EngineId, list[int]] = {}
        for place, target in enumerate(targets):
            places.setdefault(target, []).append(place)
        contexts = np.array([one.context for one in self.active], np.int64)
        profile = self.profiles[tp]
        if groups is not before and not self._fits(places, contexts, profile.kv_tokens):
            return None
        moving = max(
            profile.prefill_token_s
            * sum(self.active[p].context for p in mine if self.active[p].attempt in moves)
            for mine in places.values()
        )
        decoding = max(
            profile.decode_s(contexts[places[lead]], self.remaining[places[lead]])
            for lead in self._slowest(places, contexts)
        )
        return _Plan(
            tp=tp,
            groups=groups,
            moves=moves,
            merged=any(before.get(lead) != group for lead, group in groups.items()),
            seconds=self._step_seconds(groups, places, moving + decoding),
            moving=moving,
        )

    def _fits(
        self, places: Mapping[EngineId, list[int]], contexts: Tokens, kv_tokens: float
    ) -> bool:
        most = _HEADROOM * kv_tokens
        return all(
            peak_tokens(contexts[mine], self.remaining[mine]) <= most for mine in places.values()
        )

    def _slowest(self, places: Mapping[EngineId, list[int]], contexts: Tokens) -> set[EngineId]:
        longest = max(places, key=lambda lead: int(self.remaining[places[lead]].max()))
        fullest = max(places, key=lambda lead: int(contexts[places[lead]].sum()))
        return {longest, fullest}

    def _step_seconds(
        self, groups: _Groups, places: Mapping[EngineId, list[int]], rollout: float
    ) -> float:
        busy = {device for lead in places for device in groups[lead].devices}
        free = sum(len(self.fleet.replicas[each]) for each in self.fleet.trainable(busy))
        during = free * rollout
        return rollout + max(0.0, self.work - during) / len(self.fleet.devices)


def _merged(groups: _Groups, size: int) -> _Groups:
    """Groups of ``size`` neighbouring devices of a node, made of whole present groups."""
    owner = {device: lead for lead, group in groups.items() for device in group.devices}
    blocks: dict[tuple[int, int], list[Device]] = {}
    for device in sorted(owner):
        blocks.setdefault((device.node, device.index // size), []).append(device)
    found: _Groups = {}
    for block in blocks.values():
        leads = {owner[device] for device in block}
        if len(block) == size == sum(len(groups[lead].devices) for lead in leads):
            members = sorted(member for lead in leads for member in groups[lead].members)
            found[members[0]] = _Group(tuple(block), tuple(members))
    return found
