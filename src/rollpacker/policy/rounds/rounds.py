"""What kind of round a step runs, and how many prompts of each domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.core.groups import over_provision
from rollpacker.core.types import RoundKind
from rollpacker.policy.rounds.quotas import split


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """How far a short round over-provisions; 1 and 1 is no race."""

    eta_prompts: float = 1.0
    eta_responses: float = 1.0

    @property
    def on(self) -> bool:
        """Whether anything is started that may be thrown away."""
        return self.eta_prompts > 1.0 or self.eta_responses > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One step's round.

    Args:
        kind: full, short or long.
        quotas: groups to accept of each domain.
        draws: fresh prompts to start of each domain.
        queued: prompts to take from the long-prompt queue, first in first out.
        responses: attempts started per prompt.
        updates: updates that the round's prompts are for.
    """

    kind: RoundKind
    quotas: dict[str, int]
    draws: dict[str, int]
    queued: int
    responses: int
    updates: int = 1


def domain_quotas(
    total: int, sizes: Mapping[str, int], available: Mapping[str, int]
) -> dict[str, int]:
    """Split ``total`` prompts by domain size; what a domain cannot give goes to the others."""
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

    A long round runs when the queue holds the prompts of ``long_steps`` steps, or at the end of
    data; what is left of the data then fills it up. Without racing and without a queue every
    round is full.

    Args:
        prompts: P0.
        responses: R0.
        racing: over-provisioning of short rounds.
        queued: length of the long-prompt queue.
        sizes: prompts of each domain in the whole data.
        remaining: fresh prompts of each domain left in this epoch.
        long_steps: steps' worth of prompts in a long round; 1 in the paper.
    """
    fresh = sum(remaining.values())
    assert queued + fresh > 0, "a step was started on an epoch that is over"
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
    )
