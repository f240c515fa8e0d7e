"""Length-bucketed rounds: prompts that were long before run together, so short rounds are short.

Blind to outcomes: only the lengths of earlier visits are looked at, nothing is discarded, and
every prompt of a window runs before the next window is drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollpacker.core.types import Prompt, PromptId, sampling_seed

Predict = Callable[[PromptId], float | None]
"""Expected length of a prompt's responses, in tokens; None if it was never visited."""


class Buckets:
    """Prompts drawn ahead, in the order in which rounds take them.

    Args:
        rounds: rounds drawn together; 1 holds nothing back.
        predict: expected lengths.
    """

    def __init__(self, rounds: int, predict: Predict) -> None:
        self._rounds = rounds
        self._predict = predict
        self._held: dict[str, deque[Prompt]] = {}

    def held(self) -> dict[str, int]:
        """Prompts of each domain that were drawn and have not run."""
        return {domain: len(prompts) for domain, prompts in self._held.items() if prompts}

    def missing(self, draws: Mapping[str, int], remaining: Mapping[str, int]) -> dict[str, int]:
        """Fresh prompts to draw before a round of ``draws`` can start."""
        counts: dict[str, int] = {}
        for domain, count in draws.items():
            lacking = count - len(self._held.get(domain, ()))
            if lacking > 0:
                ahead = (self._rounds - 1) * count
                counts[domain] = min(lacking + ahead, remaining.get(domain, 0))
        return {domain: count for domain, count in counts.items() if count}

    def add(self, prompts: Sequence[Prompt], draws: Mapping[str, int], seed: int) -> None:
        """Hold freshly drawn prompts, sorted into rounds whose order ``seed`` shuffles.

        A domain with a prompt that was never visited keeps the order of the data.
        """
        for domain, count in draws.items():
            fresh = [prompt for prompt in prompts if prompt.domain == domain]
            held = self._held.setdefault(domain, deque())
            held.extend(self._bucketed(fresh, count, seed))

    def _bucketed(self, prompts: list[Prompt], size: int, seed: int) -> list[Prompt]:
        expected = {prompt.id: self._predict(prompt.id) for prompt in prompts}
        known = {name: length for name, length in expected.items() if length is not None}
        if len(known) < len(prompts):
            return prompts
        longest_last = sorted(prompts, key=lambda prompt: (known[prompt.id], prompt.id))
        rounds = [longest_last[i : i + size] for i in range(0, len(longest_last), size)]
        rounds.sort(key=lambda group: sampling_seed(seed, len(group), group[0].id, 0))
        return [prompt for group in rounds for prompt in group]

    def take(self, draws: Mapping[str, int]) -> list[Prompt]:
        """The next round's prompts."""
        return [
            self._held[domain].popleft()
            for domain, count in draws.items()
            for _ in range(min(count, len(self._held.get(domain, ()))))
        ]

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()

    def state_dict(self) -> dict[str, Any]:
        """What is held, as JSON."""
        return {domain: [asdict(p) for p in prompts] for domain, prompts in self._held.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._held = {d: deque(Prompt(**item) for item in items) for d, items in state.items()}
