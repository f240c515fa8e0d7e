"""Partial rollouts: who loses a round keeps its tokens and goes on in the next, first in line.

What the engines of that step sample has other weights than what they go on from: this is not
synchronous training (Kimi k1.5, arXiv 2501.12599, section 2.6.2; slime's ``--partial-rollout``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollpacker.core.groups import over_provision
from rollpacker.core.types import Prompt, PromptId, RoundKind
from rollpacker.policy.rounds.race import RoundPlan, domain_quotas


class Continued(NamedTuple):
    """A round, the prompts of the queue that begin in it, and those of them that it waits for."""

    plan: RoundPlan
    queued: tuple[Prompt, ...]
    due: set[PromptId]


class Carrying:
    """Which prompts go on, since when, and which of them a round has to wait for.

    Args:
        max_staleness: steps after its first within which a prompt is trained on, at least 1.
    """

    def __init__(self, max_staleness: int) -> None:
        self._most = max_staleness
        self._begun: dict[PromptId, int] = {}

    def defer(self, prompt: PromptId, step: int) -> None:
        """It has lost the round of ``step``."""
        self._begun.setdefault(prompt, step)

    def forget(self, prompt: PromptId) -> None:
        """It is trained on, or given up."""
        self._begun.pop(prompt, None)

    def clear(self) -> None:
        """The epoch is over."""
        self._begun.clear()

    def due(self, queue: Sequence[Prompt], quotas: Mapping[str, int], step: int) -> set[PromptId]:
        """Prompts of the queue, the oldest of each domain, that the round of ``step`` waits for.

        Of those that have only ``k`` steps left after it no more may stay than ``k`` rounds take.
        """
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
        """A round that begins the queue, and fresh prompts up to ``eta_prompts`` of its quotas, but
        no more than later rounds can take in time.

        Args:
            step: its step.
            prompts: P0.
            responses: R0.
            eta_prompts: prompts begun per prompt kept.
            queue: prompts that go on.
            sizes: prompts of each domain in the whole data.
            remaining: fresh prompts of each domain left in this epoch.
        """
        queued = Counter(prompt.domain for prompt in queue)
        available = {domain: queued[domain] + remaining.get(domain, 0) for domain in sizes}
        quotas = domain_quotas(prompts, sizes, available)
        due = self.due(queue, quotas, step)
        quotas = _with_room(quotas, Counter(p.domain for p in queue if p.id in due), prompts)
        # Shares of what is left change: a domain may have none where one of its prompts waits.
        begun = tuple(prompt for prompt in queue if prompt.domain in quotas)
        draws: dict[str, int] = {}
        for domain, quota in quotas.items():
            most = min(over_provision(quota, eta_prompts), quota * (1 + self._most))
            count = min(most - queued[domain], remaining.get(domain, 0))
            draws |= {domain: count} if count > 0 else {}
        begins = len(begun) + sum(draws.values())
        assert begins > 0, "a step was started on an epoch that is over"
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
        """First steps, as JSON."""
        return {str(prompt): step for prompt, step in self._begun.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore ``state_dict``."""
        self._begun = {PromptId(prompt): step for prompt, step in state.items()}


def _with_room(quotas: Mapping[str, int], due: Mapping[str, int], total: int) -> dict[str, int]:
    """Quotas that have room for what is due, at the cost of others."""
    found = {d: max(quotas.get(d, 0), due.get(d, 0)) for d in (*quotas, *due)}
    while sum(found.values()) > total:
        spare = {domain: quota - due.get(domain, 0) for domain, quota in found.items()}
        most = max(spare, key=spare.__getitem__)
        if spare[most] <= 0:
            break
        found[most] -= 1
    return {domain: quota for domain, quota in found.items() if quota}
