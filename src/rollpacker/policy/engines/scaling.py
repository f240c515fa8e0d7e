"""When a part of the rollout's devices is freed for gradients, and where its requests go.

``Halving`` is the paper's rule (RollPacker, section 4.4, Algorithm 1), which checks that the
remaining devices can hold what is coming, and the fixed one of its artifact, which does not. Ours
is in ``consolidation``. None takes devices back within a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Fleet, cheapest_half
from rollpacker.policy.lengths.censoring import KaplanMeier


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAttempt:
    """A response that is not finished.

    Args:
        attempt: its id.
        prompt_tokens: of its prompt.
        generated: tokens so far.
        engine: where it runs, or will when it has moved.
    """

    attempt: AttemptId
    prompt_tokens: int
    generated: int
    engine: EngineId

    @property
    def context(self) -> int:
        """Tokens that it holds KV for, and that a move computes again."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """Fewer devices decode from now on.

    Args:
        freed: engines that stop decoding; ``Fleet.trainable`` says which replicas can train.
        moves: new engine of every attempt that moves. An attempt may move to its own engine,
            when that one's group changes: its KV must be computed again.
        tp: devices of each group that goes on decoding.
        groups: engines whose devices become one group, by the engine that runs it; empty when
            the groups that go on are as before.
    """

    freed: tuple[EngineId, ...]
    moves: dict[AttemptId, EngineId]
    tp: int
    groups: dict[EngineId, tuple[EngineId, ...]] = field(
        default_factory=dict[EngineId, tuple[EngineId, ...]]
    )


class Scaling(ABC):
    """Decides within one round at a time."""

    _fleet: Fleet | None = None
    _lengths: KaplanMeier | None = None

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        """A round starts on all of ``fleet``; ``lengths`` is what is known of responses."""
        self._fleet, self._lengths = fleet, lengths

    def observe(
        self,
        finished: float,
        running: int,
        active: Callable[[], Sequence[ActiveAttempt]],
        gradient_tokens: int,
        now: float,
    ) -> ScaleDecision | None:
        """Take the state of the round, whenever an attempt has ended.

        Args:
            finished: share of the round's requests that have finished, 0 to 1.
            running: how many have not.
            active: describes these; called only when a rule looks at them and not just counts.
            gradient_tokens: tokens of finished groups whose gradients wait for devices.
            now: seconds.
        """
        if self._fleet is None or not running:
            return None
        if not self._due(finished, running, gradient_tokens, now):
            return None
        return self._decide(self._fleet, active(), gradient_tokens, now)

    @abstractmethod
    def _due(self, finished: float, running: int, gradient_tokens: int, now: float) -> bool:
        """Whether to look at the attempts now."""

    @abstractmethod
    def _decide(
        self, fleet: Fleet, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        """What to free now, if anything."""

    def lose(self, engine: EngineId) -> None:
        """An engine has died."""
        self._fleet = self._fleet and self._fleet.without(engine)

    def lose_replicas(self, replicas: Collection[ReplicaId]) -> None:
        """Training replicas have died, whose engines may go on."""
        if self._fleet is not None:
            self._fleet = self._fleet.training(self._fleet.replicas.keys() - replicas)


Tokens = NDArray[np.int64]


def remaining_tokens(lengths: KaplanMeier, active: Sequence[ActiveAttempt]) -> Tokens:
    """A likely number of tokens that each attempt still has to go, at least 1, shape (N,).

    The attempts are spread evenly over the quantiles of what is left of the distribution (van
    der Corput's sequence), so that their longest is as long as that of a random draw, which
    means would hide.
    """
    generated = np.array([one.generated for one in active], np.int64)
    place = np.argsort(np.argsort(np.array([one.attempt for one in active], np.int64)))
    share = np.array([_radical_inverse(rank + 1) for rank in place.tolist()])
    wanted = (1.0 - share) * lengths.at(generated)
    ends = np.searchsorted(-lengths.survival, -wanted, side="left")
    return np.maximum(1, ends.astype(np.int64) - generated)


def _radical_inverse(n: int) -> float:
    """The bits of ``n`` mirrored at the binary point."""
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
    """Free the cheapest half; its requests go to the others. None if no half can be freed."""
    by_engine: dict[EngineId, list[ActiveAttempt]] = {engine: [] for engine in fleet.engines}
    for one in active:
        if one.engine in by_engine:  # a dead one's are left out
            by_engine[one.engine].append(one)
    loads = {engine: sum(one.context for one in mine) for engine, mine in by_engine.items()}
    freed = cheapest_half(fleet, loads)
    if freed is None:
        return None
    kept = {engine: load for engine, load in loads.items() if engine not in freed}
    moved = [one for engine in freed for one in by_engine[engine]]
    return ScaleDecision(freed=freed, moves=spread(moved, kept), tp=fleet.tp)


_EVERY = 0.05
"""Shares of finished requests between two looks."""
_HEADROOM = 0.95
"""Share of the KV that the projected peak may take after a move."""
_ROUNDING = 1e-9


class Halving(Scaling):
    """Frees half of the devices, once a round, between two shares of finished requests.

    Args:
        kv_tokens: KV tokens that a group of so many devices holds: as soon as the other half can
            hold the rest, which takes what is known of lengths. None: whether or not it can.
        first, last: the shares.
    """

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
        """A round starts on all of ``fleet``."""
        super().begin(fleet, lengths)
        self._done, self._tried = False, -1

    def _due(self, finished: float, running: int, gradient_tokens: int, now: float) -> bool:
        """When a new mark of progress is passed."""
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
