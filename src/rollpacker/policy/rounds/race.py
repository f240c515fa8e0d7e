"""The kind of a step's round, its prompts of each domain, and which responses count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollpacker.core.groups import differ, over_provision
from rollpacker.core.types import AttemptId, Prompt, PromptId, RoundKind
from rollpacker.policy.ledger import Attempt

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """How far a short round over-provisions. 1 and 1 is no race, unless the round ``stops``."""

    eta_prompts: float = 1.0
    eta_responses: float = 1.0
    stops: bool = False  # whether a rule may end the round before all of its groups are complete

    @property
    def on(self) -> bool:
        """Whether any started attempt may be thrown away."""
        return self.stops or self.eta_prompts > 1.0 or self.eta_responses > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One step's round.

    Args:
        quotas, draws: groups to accept, and fresh prompts to start, of each domain.
        queued: prompts to take from the long-prompt queue, first in first out.
        responses: attempts started per prompt.
        updates: updates of the round's prompts.
        stops: whether a rule may end the round.
    """

    kind: RoundKind
    quotas: dict[str, int]
    draws: dict[str, int]
    queued: int
    responses: int
    updates: int = 1
    stops: bool = False


def split(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split ``total`` in proportion to ``weights`` by largest remainder. Ties go to the earlier
    key. Raises ``ValueError`` on a negative, infinite or all-zero weight."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"weight of domain {name!r} must be finite and >= 0, got {weight}")
    whole = math.fsum(weights.values())
    if whole <= 0.0:
        raise ValueError("domain weights must have a positive sum: give one domain a weight > 0")
    shares = {name: total * (weight / whole) for name, weight in weights.items()}
    parts = {name: math.floor(share + _ROUNDING) for name, share in shares.items()}
    left = total - sum(parts.values())
    # Rounded remainders, so that equal weights tie despite rounding errors.
    order = sorted(shares, key=lambda name: -round(shares[name] - parts[name], 9))
    for name in order[:left]:
        parts[name] += 1
    return parts


def domain_quotas(
    total: int, sizes: Mapping[str, int], available: Mapping[str, int]
) -> dict[str, int]:
    """Split ``total`` prompts by domain size. Other domains fill the shortfall of a domain."""
    quotas = {name: 0 for name in sizes}
    left = min(total, sum(available.values()))
    while left > 0:
        open_ = {n: sizes[n] for n in sizes if quotas[n] < available.get(n, 0)}
        for name, count in split(left, open_).items():
            quotas[name] += min(count, available[name] - quotas[name])
        left = min(total, sum(available.values())) - sum(quotas.values())
    return {name: count for name, count in quotas.items() if count}


def plan_round(
    *,
    prompts: int,
    responses: int,
    racing: Racing,
    queued: int,
    sizes: Mapping[str, int],
    remaining: Mapping[str, int],
    long_steps: int = 1,
) -> RoundPlan:
    """Choose the round (RollPacker, section 3).

    A long round runs when the queue holds the prompts of ``long_steps`` steps (1 in the paper), or
    at the end of the data, whose rest fills it up. Without racing and without a queue every round
    is full.

    ``racing`` over-provisions short rounds. ``sizes`` are prompts of each domain in the whole data,
    ``remaining`` the fresh ones left in this epoch.
    """
    fresh = sum(remaining.values())
    assert queued + fresh > 0, "a step was started after its epoch's end"
    race = racing.on and fresh >= prompts
    if queued and (not race or queued >= long_steps * prompts):
        updates = long_steps if race else 1
        taken = min(queued, updates * prompts)
        return RoundPlan(
            kind=RoundKind.LONG,
            quotas={},
            draws=domain_quotas(prompts - taken, sizes, remaining),
            queued=taken,
            responses=responses,
            updates=updates,
        )
    quotas = domain_quotas(prompts, sizes, remaining)
    if not race:
        return RoundPlan(
            kind=RoundKind.FULL, quotas=quotas, draws=quotas, queued=0, responses=responses
        )
    draws = {n: min(over_provision(q, racing.eta_prompts), remaining[n]) for n, q in quotas.items()}
    return RoundPlan(
        kind=RoundKind.SHORT,
        quotas=quotas,
        draws=draws,
        queued=0,
        responses=over_provision(responses, racing.eta_responses),
        stops=racing.stops,
    )


@dataclass(slots=True)
class Race:
    """One prompt in one round. ``wanted`` graded attempts complete its group. An ``audit`` is never
    aborted, so that its lengths are an unbiased sample."""

    prompt: Prompt
    wanted: int
    audit: bool = False
    graded: list[Attempt] = field(default_factory=list[Attempt])
    next_index: int = 0
    failures: int = 0
    done: bool = False

    @property
    def complete(self) -> bool:
        return len(self.graded) >= self.wanted

    def kept(self) -> tuple[AttemptId, ...]:
        first = sorted(self.graded[: self.wanted], key=lambda attempt: attempt.index)
        return tuple(attempt.id for attempt in first)

    def informative(self, least: float) -> bool:
        rewards = [attempt.reward for attempt in self.graded[: self.wanted]]
        return differ([reward for reward in rewards if reward is not None], least)


@dataclass(slots=True)
class RoundState:
    """The round in progress. ``due`` are undecided prompts for which it keeps places."""

    step: int
    plan: RoundPlan
    due: set[PromptId]
    races: dict[PromptId, Race] = field(default_factory=dict[PromptId, Race])
    undecided: int = 0  # races that are not done
    audited: dict[PromptId, Race] = field(default_factory=dict[PromptId, Race])
    waiting: dict[AttemptId, Attempt] = field(default_factory=dict[AttemptId, Attempt])
    """Finished attempts that are graded when the whole round has finished."""
    accepted: Counter[str] = field(default_factory=Counter[str])
    longest: int = 0  # tokens of the longest response that has ended
    ready: list[Race] = field(default_factory=list[Race])
    """Complete, but all remaining places are kept for others."""
    waiting_for_prompts: bool = False
    draws: int = 0
    stopped: bool = False  # whether a rule has ended it
    finished: bool = False

    def end(self, race: Race) -> None:
        race.done = True
        self.undecided -= 1
        self.due.discard(race.prompt.id)

    def taken(self, domain: str | None) -> int:
        return self.accepted.total() if domain is None else self.accepted[domain]

    def free(self, domain: str | None, wanted: int | None) -> bool:
        due = sum(domain in (None, self.races[prompt].prompt.domain) for prompt in self.due)
        return wanted is None or self.taken(domain) + due < wanted


class Continued(NamedTuple):
    """A round, the queued prompts that begin in it, and those of them that it waits for."""

    plan: RoundPlan
    queued: tuple[Prompt, ...]
    due: set[PromptId]


class Carrying:
    """Partial rollouts: a prompt that loses a round keeps its tokens and continues in the next,
    first in line. It is trained on within ``max_staleness`` steps (at least 1) after its first, so
    some rounds must wait for it."""

    def __init__(self, max_staleness: int) -> None:
        self._most = max_staleness
        self._begun: dict[PromptId, int] = {}

    def defer(self, prompt: PromptId, step: int) -> None:
        self._begun.setdefault(prompt, step)

    def forget(self, prompt: PromptId) -> None:
        self._begun.pop(prompt, None)

    def clear(self) -> None:
        self._begun.clear()

    def due(self, queue: Sequence[Prompt], quotas: Mapping[str, int], step: int) -> set[PromptId]:
        """Prompts of the queue, the oldest of each domain, that the round of ``step`` waits for. At
        most as many prompts with ``k`` steps left may stay as ``k`` rounds take."""
        found: set[PromptId] = set()
        for domain in {prompt.domain: None for prompt in queue}:
            each = max(1, quotas.get(domain, 0))
            mine = [prompt.id for prompt in queue if prompt.domain == domain]
            mine.sort(key=self._begun.__getitem__)
            left = (self._most - (step - self._begun[prompt]) for prompt in mine)
            seats = max(n - max(0, more) * each for n, more in enumerate(left, 1))
            found.update(mine[: max(0, seats)])
        return found

    def plan(
        self,
        step: int,
        *,
        prompts: int,
        responses: int,
        eta_prompts: float,
        queue: Sequence[Prompt],
        sizes: Mapping[str, int],
        remaining: Mapping[str, int],
    ) -> Continued:
        """A round that begins the queue, and fresh prompts up to ``eta_prompts`` of its quotas that
        later rounds can take in time."""
        queued = Counter(prompt.domain for prompt in queue)
        available = {domain: queued[domain] + remaining.get(domain, 0) for domain in sizes}
        quotas = domain_quotas(prompts, sizes, available)
        due = self.due(queue, quotas, step)
        quotas = _with_room(quotas, Counter(p.domain for p in queue if p.id in due), prompts)
        # Shares change with the remaining prompts, so a domain with a waiting prompt may have none.
        begun = tuple(prompt for prompt in queue if prompt.domain in quotas)
        draws: dict[str, int] = {}
        for domain, quota in quotas.items():
            most = min(over_provision(quota, eta_prompts), quota * (1 + self._most))
            count = min(most - queued[domain], remaining.get(domain, 0))
            draws |= {domain: count} if count > 0 else {}
        begins = len(begun) + sum(draws.values())
        assert begins > 0, "a step was started after its epoch's end"
        unraced = RoundKind.LONG if begun else RoundKind.FULL
        plan = RoundPlan(
            kind=RoundKind.SHORT if begins > sum(quotas.values()) else unraced,
            quotas=quotas,
            draws=draws,
            queued=len(begun),
            responses=responses,
        )
        return Continued(plan, begun, due)

    def state_dict(self) -> dict[str, int]:
        return {str(prompt): step for prompt, step in self._begun.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._begun = {PromptId(prompt): step for prompt, step in state.items()}


def _with_room(quotas: Mapping[str, int], due: Mapping[str, int], total: int) -> dict[str, int]:
    found = {d: max(quotas.get(d, 0), due.get(d, 0)) for d in (*quotas, *due)}
    while sum(found.values()) > total:
        spare = {domain: quota - due.get(domain, 0) for domain, quota in found.items()}
        most = max(spare, key=spare.__getitem__)
        if spare[most] <= 0:
            break
        found[most] -= 1
    return {domain: quota for domain, quota in found.items() if quota}
