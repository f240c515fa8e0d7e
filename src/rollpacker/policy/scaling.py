"""When a part of the rollout's devices is freed for gradients, and where its requests go.

Two rules: the paper's (RollPacker, section 4.4, Algorithm 1), which checks that the remaining
devices can hold what is coming, and the fixed one of its artifact, which does not. Ours is in
``consolidation``. All free devices once and never take them back within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, EngineId
from rollpacker.policy.censoring import KaplanMeier
from rollpacker.policy.fleet import Fleet, cheapest_half


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


class Scaling(Protocol):
    """Decides within one round at a time."""

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        """A round starts on all of ``fleet``; ``lengths`` is what is known of responses."""
        ...

    def observe(
        self, finished: float, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        """Take the state of the round, whenever an attempt has ended.

        Args:
            finished: share of the round's requests that have finished, 0 to 1.
            active: those that have not.
            gradient_tokens: tokens of finished groups whose gradients wait for devices.
            now: seconds.
        """
        ...

    def lose(self, engine: EngineId) -> None:
        """An engine has died."""
        ...


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


def contexts_by_engine(
    fleet: Fleet, active: Iterable[ActiveAttempt]
) -> dict[EngineId, list[ActiveAttempt]]:
    """The attempts of each engine of a fleet; a dead engine's are left out."""
    found: dict[EngineId, list[ActiveAttempt]] = {engine: [] for engine in fleet.engines}
    for one in active:
        if one.engine in found:
            found[one.engine].append(one)
    return found


def halve(fleet: Fleet, active: Sequence[ActiveAttempt]) -> ScaleDecision | None:
    """Free the cheapest half; its requests go to the others. None if no half can be freed."""
    by_engine = contexts_by_engine(fleet, active)
    loads = {engine: sum(one.context for one in mine) for engine, mine in by_engine.items()}
    freed = cheapest_half(fleet, loads)
    if freed is None:
        return None
    kept = {engine: load for engine, load in loads.items() if engine not in freed}
    moved = [one for engine in freed for one in by_engine[engine]]
    return ScaleDecision(freed=freed, moves=spread(moved, kept), tp=fleet.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperScalingSettings:
    """The paper's constants.

    Args:
        first, last: share of finished requests between which devices are freed.
        every: growth of that share between two tries.
        headroom: share of the KV that the projected peak may take.
    """

    first: float = 0.2
    last: float = 0.5
    every: float = 0.05
    headroom: float = 0.95


class PaperScaling:
    """Frees half of the devices, once a round, as soon as the other half can hold the rest.

    Args:
        settings: its constants.
        kv_tokens: KV tokens that a group of so many devices holds.
    """

    def __init__(self, settings: PaperScalingSettings, kv_tokens: Callable[[int], float]) -> None:
        self._settings = settings
        self._kv_tokens = kv_tokens
        self._fleet: Fleet | None = None
        self._lengths: KaplanMeier | None = None
        self._done = False
        self._tried = -1

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        """A round starts on all of ``fleet``; without ``lengths`` nothing is freed in it."""
        self._fleet, self._lengths = fleet, lengths
        self._done, self._tried = False, -1

    def observe(
        self, finished: float, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        """Free half when a new mark of progress is passed and the rest fits."""
        del gradient_tokens, now
        if self._done or self._fleet is None or self._lengths is None or not self._due(finished):
            return None
        decision = halve(self._fleet, active)
        if decision is None or not self._fits(self._lengths, active, decision):
            return None
        self._done = True
        return decision

    def _due(self, finished: float) -> bool:
        rules = self._settings
        if not rules.first - _ROUNDING <= finished <= rules.last + _ROUNDING:
            return False
        mark = int((finished - rules.first) / rules.every + _ROUNDING)
        due = mark > self._tried
        self._tried = max(mark, self._tried)
        return due

    def _fits(
        self, lengths: KaplanMeier, active: Sequence[ActiveAttempt], decision: ScaleDecision
    ) -> bool:
        remaining = remaining_tokens(lengths, active)
        contexts = np.array([one.context for one in active], np.int64)
        targets = np.array([decision.moves.get(one.attempt, one.engine) for one in active])
        most = self._settings.headroom * self._kv_tokens(decision.tp)
        return all(
            peak_tokens(contexts[targets == engine], remaining[targets == engine]) <= most
            for engine in set(targets.tolist())
        )

    def lose(self, engine: EngineId) -> None:
        """An engine has died."""
        self._fleet = self._fleet and self._fleet.without(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedScalingSettings:
    """The artifact's constants (its Table 3 example).

    Args:
        fraction: share of finished requests at which half of the devices is freed; 0 never.
    """

    fraction: float = 0.4


class FixedScaling:
    """Frees half of the devices at a fixed progress, whether or not the rest fits."""

    def __init__(self, settings: FixedScalingSettings) -> None:
        self._settings = settings
        self._fleet: Fleet | None = None
        self._done = False

    def begin(self, fleet: Fleet, lengths: KaplanMeier | None) -> None:
        """A round starts on all of ``fleet``; lengths are not looked at."""
        del lengths
        self._fleet, self._done = fleet, False

    def observe(
        self, finished: float, active: Sequence[ActiveAttempt], gradient_tokens: int, now: float
    ) -> ScaleDecision | None:
        """Free half when the fraction is reached."""
        del gradient_tokens, now
        fraction = self._settings.fraction
        reached = fraction > 0.0 and finished >= fraction - _ROUNDING
        if self._done or self._fleet is None or not reached or not active:
            return None
        self._done = True
        return halve(self._fleet, active)

    def lose(self, engine: EngineId) -> None:
        """An engine has died."""
        self._fleet = self._fleet and self._fleet.without(engine)


_ROUNDING = 1e-9
