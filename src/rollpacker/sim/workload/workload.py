"""Samples of a simulated job: prompts in order, and the length of every response.

A response's length depends on the run's seed, its prompt, the prompt's earlier visits and the
response's index, but never on scheduling. So all modes see the same first visits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, Prompt, PromptId
from rollpacker.policy.rounds.race import split
from rollpacker.polytrace.model.lengths import Floats, Lengths
from rollpacker.polytrace.model.turns import TraceResponse, TurnModel

# --- Requests to a simulated engine

ToolKv = Literal["cached", "kept", "dropped"]
"""Treatment of a response's KV while it waits for tools. ``cached``, as in vLLM: the request has
ended, and its blocks can be found again until others need them, least recently used first.
``kept``: the same, but nothing is admitted in their place. ``dropped``: none is kept."""


class SimulatedRequest(NamedTuple):
    """One turn of an attempt: ``target_tokens``, ``generated`` of them elsewhere (it migrated).

    Its context begins with the prompt and ``earlier`` tokens of turns and tools. The requests of a
    ``group`` share the prompt's prefill while one of them is held. ``returns``: a turn follows,
    which may find this one's KV.
    """

    attempt: int
    group: str
    prompt_tokens: int
    target_tokens: int
    generated: int = 0
    earlier: int = 0
    returns: bool = False


@dataclass(slots=True, eq=False)
class Live:
    """A held request. ``start`` is the step count at which it would have had no token."""

    attempt: int
    group: str
    shared: int
    prompt: int
    returns: bool
    target: int
    generated: int
    start: int = 0
    ticket: int = -1
    gone: bool = False


# --- One response: its turns, and how far it has come


class ScriptedTurn(NamedTuple):
    """``tokens`` to generate. Then tools answer for ``tool_s`` and add ``added`` tokens. A first
    turn without tokens is the start of an environment. If the last turn has a ``tool_s``, the
    response ends when its environment has processed the end."""

    tokens: int
    tool_s: float = 0.0
    added: int = 0


Turns = tuple[ScriptedTurn, ...]


def recorded_turns(response: TraceResponse) -> Turns:
    """Convert a recorded response's turns. A turn without tokens joins the one before. Tools of
    the last turn answer nothing."""
    made: list[ScriptedTurn] = []
    nexts = [turn.prompt for turn in response.turns[1:]]
    for turn, after in zip(response.turns, [*nexts, 0], strict=True):
        added = max(0, after - turn.prompt - turn.tokens)
        if turn.tokens == 0 and made:
            last = made.pop()
            made.append(ScriptedTurn(last.tokens, last.tool_s + turn.tool_s, last.added + added))
        elif turn.tokens > 0:
            made.append(ScriptedTurn(turn.tokens, turn.tool_s, added))
    return (*made[:-1], ScriptedTurn(made[-1].tokens)) if made else (ScriptedTurn(1),)


def at_most(turns: Turns, tokens: int) -> Turns:
    """Truncate the response after ``tokens``. Its environment still processes the end."""
    if len(turns) == 1 and turns[0].tokens <= tokens:
        return turns
    kept: list[ScriptedTurn] = []
    left = tokens
    for turn in turns:
        if turn.tokens >= left:
            return (*kept, ScriptedTurn(left, turns[-1].tool_s))
        kept.append(turn)
        left -= turn.tokens
    return tuple(kept)


@dataclass(slots=True, eq=False)
class TurnScript:
    """The progress of an attempt, on any engine. ``turns``: all of them, at least one that
    generates."""

    attempt: AttemptId
    group: str
    prompt_tokens: int
    turns: Turns
    tokens: int = field(init=False)  # total of all turns
    before: int = 0
    added: int = 0
    generated: int = 0  # tokens of this turn when an engine gets it
    _place: int = 0

    def __post_init__(self) -> None:
        turns = self.turns
        self.tokens = turns[0].tokens if len(turns) == 1 else sum(turn.tokens for turn in turns)

    @property
    def so_far(self) -> int:
        """Tokens of finished turns, and of this one when it last left an engine."""
        return self.before + self.generated

    def go_on(self, attempt: AttemptId) -> TurnScript:
        return replace(self, attempt=attempt)

    @property
    def tool_s(self) -> float:
        return sum(turn.tool_s for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        return self.tokens + self.added

    @property
    def opens(self) -> bool:
        return not self._place and not self.turns[0].tokens

    @property
    def turn(self) -> ScriptedTurn:
        return self.turns[self._place]

    @property
    def number(self) -> int:
        """Number of this turn, from 0. -1 while its environment begins."""
        return self._place if self.turns[0].tokens else self._place - 1

    @property
    def _last(self) -> bool:
        return self._place + 1 == len(self.turns)

    def request(self) -> SimulatedRequest:
        return SimulatedRequest(
            self.attempt,
            self.group,
            self.prompt_tokens,
            self.turns[self._place].tokens,
            self.generated,
            self.before + self.added,
            not self._last,
        )

    def end_turn(self) -> bool:
        """End this turn, and return whether tools are next."""
        turn = self.turns[self._place]
        self.before += turn.tokens
        self.generated = 0
        return not self._last or turn.tool_s > 0.0

    def answer(self) -> bool:
        """Add the tools' answer, and return whether another turn follows."""
        if self._last:
            return False
        self.added += self.turns[self._place].added
        self._place += 1
        return True


_BLOCK = 16
_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt of a trace: its shared traits and its known responses."""

    traits: Floats
    lengths: NDArray[np.int32]
    rewards: tuple[float, ...] | None = None
    turns: tuple[Turns, ...] = ()  # turns of the responses. Empty if each is one turn.


@dataclass(slots=True)
class _Visit:
    number: int
    domain: str
    traits: Floats
    recorded: Recorded | None
    step: int = -1
    visits: int = -1
    lengths: list[int] = field(default_factory=list[int])
    turns: list[Turns] = field(default_factory=list[Turns])


class Workload(Protocol):
    """Samples of a simulated job."""

    @property
    def prompt_tokens(self) -> int: ...

    def remaining(self) -> dict[str, int]: ...

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]: ...

    def turns(self, step: int, prompt: PromptId, index: int) -> Turns: ...

    def reward(self, step: int, prompt: PromptId, index: int) -> float: ...

    def domain(self, prompt: PromptId) -> str: ...

    def run_s(self, step: int, prompt: PromptId, index: int) -> float:
        """Return the seconds that the response's program would run, in a domain of code."""
        ...

    def forget(self, prompt: PromptId) -> None: ...


class DrawnWorkload:
    """An endless stream of prompts.

    Args:
        domains: share of each domain, any positive numbers.
        recorded: prompts that come first, in this order, with these lengths on their first visit.
        turns: model that splits drawn lengths into turns. None if each is one turn.
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
        return dict(self._shares)

    def remaining(self) -> dict[str, int]:
        return dict.fromkeys(self._shares, _ENDLESS)

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """Take fresh prompts of each domain. Domains take turns, as in shuffled data."""
        drawn: list[Prompt] = []
        for domain in interleaved(counts):
            id_ = PromptId(f"p{self._drawn}")
            self.place(id_, domain, number=self._drawn)
            self._drawn += 1
            drawn.append(Prompt(id=id_, domain=domain, tokens=self.prompt_tokens))
        return tuple(drawn)

    def place(self, prompt: PromptId, domain: str, *, number: int, visits: int = 0) -> None:
        """Restore a prompt that was the ``number``-th drawn and was sampled in ``visits`` steps."""
        known = self._recorded[number] if number < len(self._recorded) else None
        rng = np.random.default_rng([self._seed, 0, number])
        self._out[prompt] = _Visit(
            number=number,
            domain=domain,
            traits=self._lengths.traits(rng, 1) if known is None else known.traits,
            recorded=known,
            visits=visits - 1,
        )

    def length(self, step: int, prompt: PromptId, index: int) -> int:
        visit = self._visit(step, prompt)
        lengths = visit.lengths
        while index >= len(lengths):
            seed = [self._seed, 1, visit.number, visit.visits, len(lengths)]
            rng = np.random.default_rng(seed)
            lengths += self._lengths.given(rng, visit.traits, _BLOCK)[0].tolist()
        return lengths[index]

    def _visit(self, step: int, prompt: PromptId) -> _Visit:
        visit = self._out[prompt]
        if visit.step != step:
            visit.step = step
            visit.visits += 1
            known = visit.recorded if visit.visits == 0 else None
            visit.lengths = [] if known is None else known.lengths.tolist()
            visit.turns = [] if known is None else list(known.turns)
        return visit

    def turns(self, step: int, prompt: PromptId, index: int) -> Turns:
        tokens = self.length(step, prompt, index)
        visit = self._out[prompt]
        if self._turns is None and not visit.turns:
            return (ScriptedTurn(tokens),)
        while index >= len(visit.turns):
            visit.turns += self._more_turns(visit)
        return visit.turns[index]

    def _more_turns(self, visit: _Visit) -> list[Turns]:
        have = len(visit.turns)
        tokens = visit.lengths[have : have + _BLOCK]
        if self._turns is None:
            return [(ScriptedTurn(each),) for each in tokens]
        rng = np.random.default_rng([self._seed, 5, visit.number, visit.visits, have])
        prompts = np.full(len(tokens), self.prompt_tokens)
        drawn = self._turns.responses(rng, prompts, np.array(tokens, np.int64))
        return [recorded_turns(response) for response in drawn]

    def reward(self, step: int, prompt: PromptId, index: int) -> float:  # noqa: ARG002
        """Return the recorded reward, else 0 and 1 in turn, so that groups have gradients."""
        known = self._out[prompt].recorded
        rewards = None if known is None else known.rewards
        return float(index % 2) if rewards is None else rewards[index % len(rewards)]

    def domain(self, prompt: PromptId) -> str:
        return self._out[prompt].domain

    def forget(self, prompt: PromptId) -> None:
        self._out.pop(prompt)

    def run_s(self, step: int, prompt: PromptId, index: int) -> float:
        """Return the seconds that the program would run: log-normal, and some never end."""
        visit = self._out[prompt]
        rng = np.random.default_rng([self._seed, 2, visit.number, step, index])
        return float("inf") if rng.random() < _HANGING else float(rng.lognormal(-0.7, 0.8))


_HANGING = 0.1  # share of generated programs that run into their timeout. Assumed.


def interleaved(counts: Mapping[str, int]) -> list[str]:
    """Return every domain as often as it counts, spread evenly."""
    order: list[str] = []
    given = dict.fromkeys(counts, 0)
    for place in range(1, sum(counts.values()) + 1):
        due = split(place, counts)
        name = max(counts, key=lambda n: due[n] - given[n])
        given[name] += 1
        order.append(name)
    return order
