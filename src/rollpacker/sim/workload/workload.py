"""What a simulated job samples: prompts in order, and the length of every response.

A response's length depends on the run's seed, its prompt, how often the prompt was tried before
and the response's index: never on scheduling. So all modes see the same first visits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import Prompt, PromptId
from rollpacker.policy.rounds.race import split
from rollpacker.polytrace.model.length_model import Floats, Lengths
from rollpacker.polytrace.model.turn_model import TurnModel
from rollpacker.sim.workload.turn_script import ScriptedTurn, Turns, recorded_turns

_BLOCK = 16
"""Lengths drawn at a time for one prompt."""
_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt of a trace: what it shares with further responses, and those that are known."""

    traits: Floats
    lengths: NDArray[np.int32]
    rewards: tuple[float, ...] | None = None
    turns: tuple[Turns, ...] = ()
    """Of the responses; empty where each is one turn."""


@dataclass(slots=True)
class _Visit:
    """A prompt that is out: its lengths in the step that samples it."""

    number: int
    domain: str
    traits: Floats
    recorded: Recorded | None
    step: int = -1
    visits: int = -1
    lengths: list[int] = field(default_factory=list[int])
    turns: list[Turns] = field(default_factory=list[Turns])


class Workload(Protocol):
    """What a simulated job samples."""

    @property
    def prompt_tokens(self) -> int:
        """Length of every prompt."""
        ...

    def remaining(self) -> dict[str, int]:
        """Fresh prompts that are left of each domain."""
        ...

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Take fresh prompts of each domain."""
        ...

    def turns(self, step: int, prompt: PromptId, index: int) -> Turns:
        """Of one response."""
        ...

    def reward(self, step: int, prompt: PromptId, index: int) -> float:
        """Of one response."""
        ...

    def domain(self, prompt: PromptId) -> str:
        """Of a prompt that is out."""
        ...

    def run_s(self, step: int, prompt: PromptId, index: int) -> float:
        """Seconds that the response's program would run, in a domain of code."""
        ...

    def forget(self, prompt: PromptId) -> None:
        """The prompt is done; it never comes again."""
        ...


class DrawnWorkload:
    """An endless stream of prompts.

    Args:
        domains: share of each domain; any positive numbers.
        prompt_tokens: length of every prompt.
        recorded: prompts that come first, in this order, with these lengths on their first visit.
        turns: how drawn lengths are split into turns; None where each is one.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        domains: Mapping[str, float],
        prompt_tokens: int,
        seed: int,
        recorded: Sequence[Recorded] = (),
        turns: TurnModel | None = None,
    ) -> None:
        self._lengths = lengths
        self._turns = turns
        self._shares = {name: max(1, round(1000 * share)) for name, share in domains.items()}
        self.prompt_tokens = prompt_tokens
        self._seed = seed
        self._recorded = recorded
        self._drawn = 0
        self._out: dict[PromptId, _Visit] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Weight of each domain, as a policy takes them."""
        return dict(self._shares)

    def remaining(self) -> dict[str, int]:
        """Fresh prompts that are left: always enough."""
        return dict.fromkeys(self._shares, _ENDLESS)

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Take fresh prompts of each domain; domains take turns, as in shuffled data."""
        drawn: list[Prompt] = []
        for domain in interleaved(counts):
            id_ = PromptId(f"p{self._drawn}")
            self.place(id_, domain, number=self._drawn)
            self._drawn += 1
            drawn.append(Prompt(id=id_, domain=domain, tokens=self.prompt_tokens))
        return tuple(drawn)

    def place(self, prompt: PromptId, domain: str, *, number: int, visits: int = 0) -> None:
        """A prompt is out that was drawn as the ``number``-th, and has been sampled in so many
        steps."""
        known = self._recorded[number] if number < len(self._recorded) else None
        self._out[prompt] = _Visit(
            number=number,
            domain=domain,
            traits=self._traits(number) if known is None else known.traits,
            recorded=known,
            visits=visits - 1,
        )

    def _traits(self, number: int) -> Floats:
        """Of the prompt of this number, whichever draw it comes with."""
        return self._lengths.traits(np.random.default_rng([self._seed, 0, number]), 1)

    def length(self, step: int, prompt: PromptId, index: int) -> int:
        """Tokens of one response."""
        visit = self._visit(step, prompt)
        lengths = visit.lengths
        while index >= len(lengths):
            seed = [self._seed, 1, visit.number, visit.visits, len(lengths)]
            rng = np.random.default_rng(seed)
            lengths += self._lengths.given(rng, visit.traits, _BLOCK)[0].tolist()
        return lengths[index]

    def _visit(self, step: int, prompt: PromptId) -> _Visit:
        """A prompt in the step that samples it: what was recorded of it, then draws."""
        visit = self._out[prompt]
        if visit.step != step:
            visit.step = step
            visit.visits += 1
            known = visit.recorded if visit.visits == 0 else None
            visit.lengths = [] if known is None else known.lengths.tolist()
            visit.turns = [] if known is None else list(known.turns)
        return visit

    def turns(self, step: int, prompt: PromptId, index: int) -> Turns:
        """Of one response."""
        tokens = self.length(step, prompt, index)
        visit = self._out[prompt]
        if self._turns is None and not visit.turns:
            return (ScriptedTurn(tokens),)
        while index >= len(visit.turns):
            visit.turns += self._more_turns(visit)
        return visit.turns[index]

    def _more_turns(self, visit: _Visit) -> list[Turns]:
        """Of the next responses whose lengths are drawn."""
        have = len(visit.turns)
        tokens = visit.lengths[have : have + _BLOCK]
        if self._turns is None:
            return [(ScriptedTurn(each),) for each in tokens]
        rng = np.random.default_rng([self._seed, 5, visit.number, visit.visits, have])
        prompts = np.full(len(tokens), self.prompt_tokens)
        drawn = self._turns.responses(rng, prompts, np.array(tokens, np.int64))
        return [recorded_turns(response) for response in drawn]

    def reward(self, step: int, prompt: PromptId, index: int) -> float:  # noqa: ARG002
        """Of a response: as recorded, else 0 and 1 in turn, so that groups have gradients."""
        known = self._out[prompt].recorded
        rewards = None if known is None else known.rewards
        return float(index % 2) if rewards is None else rewards[index % len(rewards)]

    def domain(self, prompt: PromptId) -> str:
        """Of a prompt that is out."""
        return self._out[prompt].domain

    def forget(self, prompt: PromptId) -> None:
        """The prompt is done; it never comes again."""
        self._out.pop(prompt)

    def run_s(self, step: int, prompt: PromptId, index: int) -> float:
        """Seconds that the response's program would run: log-normal, some hang for ever."""
        visit = self._out[prompt]
        rng = np.random.default_rng([self._seed, 2, visit.number, step, index])
        return float("inf") if rng.random() < _HANGING else float(rng.lognormal(-0.7, 0.8))


_HANGING = 0.1
"""Share of generated programs that run into their timeout; assumed."""


def interleaved(counts: Mapping[str, int]) -> list[str]:
    """Every domain as often as it counts, spread evenly."""
    order: list[str] = []
    given = dict.fromkeys(counts, 0)
    for place in range(1, sum(counts.values()) + 1):
        due = split(place, counts)
        name = max(counts, key=lambda n: due[n] - given[n])
        given[name] += 1
        order.append(name)
    return order
