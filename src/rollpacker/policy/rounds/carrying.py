"""Partial rollouts: who loses a round keeps its tokens and goes on in the next, first in line.

What the engines of that step sample has other weights than what they go on from: this is not
synchronous training (Kimi k1.5, arXiv 2501.12599, section 2.6.2; slime's ``--partial-rollout``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rollpacker.core.groups import over_provision
from rollpacker.core.types import Prompt, PromptId, RoundKind
from rollpacker.policy.rounds.race import RoundPlan, domain_quotas


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
        """Prompts of the queue, oldest first, that the round of ``step`` must wait for.

        Of those that have only ``k`` steps left after it no more may stay than ``k`` rounds take.
        """
        found: set[PromptId] = set()
        for domain, quota in quotas.items():
            mine = [prompt.id for prompt in queue if prompt.domain == domain]
            mine.sort(key=self._begun.__getitem__)
            left = (self._most - (step - self._begun[prompt]) for prompt in mine)
            seats = max((n - max(0, more) * quota for n, more in enumerate(left, 1)), default=0)
            found.update(mine[: max(0, seats)])
        return found

    def state_dict(self) -> dict[str, int]:
        """First steps, as JSON."""
        return {str(prompt): step for prompt, step in self._begun.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore ``state_dict``."""
        self._begun = {PromptId(prompt): step for prompt, step in state.items()}


def plan_carrying(
    *,
    prompts: int,
    responses: int,
    eta_prompts: float,
    queue: Sequence[Prompt],
    sizes: Mapping[str, int],
    remaining: Mapping[str, int],
) -> RoundPlan:
    """A round that begins the whole queue, and fresh prompts up to ``eta_prompts`` of its quotas.

    Args:
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
    # Shares of what is left change: a domain may have none where one of its prompts waits.
    quotas |= {domain: 1 for domain in queued if domain not in quotas}
    draws = {
        domain: count
        for domain, quota in quotas.items()
        if (count := min(_more(quota, eta_prompts, queued[domain]), remaining.get(domain, 0)))
    }
    kept, begun = sum(quotas.values()), len(queue) + sum(draws.values())
    assert begun > 0, "a step was started on an epoch that is over"
    unraced = RoundKind.LONG if queue else RoundKind.FULL
    return RoundPlan(
        kind=RoundKind.SHORT if begun > kept else unraced,
        quotas=quotas,
        draws=draws,
        queued=len(queue),
        responses=responses,
    )


def _more(quota: int, eta: float, queued: int) -> int:
    return max(0, over_provision(quota, eta) - queued)
