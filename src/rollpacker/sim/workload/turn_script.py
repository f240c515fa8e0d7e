"""A simulated response: its turns, the tools between them, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollpacker.core.types import AttemptId
from rollpacker.polytrace.model.turns import TraceResponse
from rollpacker.sim.workload.sequences import SimulatedRequest


class ScriptedTurn(NamedTuple):
    """``tokens`` to generate; then tools answer for ``tool_s`` and put ``added`` tokens in.

    A first turn without tokens is the time that an environment takes to begin. Where the last one
    has a ``tool_s``, the response ends when its environment has heard of it.
    """

    tokens: int
    tool_s: float = 0.0
    added: int = 0


Turns = tuple[ScriptedTurn, ...]


def recorded_turns(response: TraceResponse) -> Turns:
    """A recorded response's turns; those without tokens join the one before, the last one's
    tools answer nobody.
    """
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
    """The response cut off after so many tokens; what hears of its end hears of that."""
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
    """How far an attempt has come, on whatever engine.

    Args:
        turns: all of them, at least one that generates.
    """

    attempt: AttemptId
    group: str
    prompt_tokens: int
    turns: Turns
    tokens: int = field(init=False)
    """Generated in all turns, in the end."""
    before: int = 0
    """Generated in turns that are over."""
    added: int = 0
    """Put in by tools so far."""
    generated: int = 0
    """Of this turn, when it comes to an engine."""
    _place: int = 0

    def __post_init__(self) -> None:
        turns = self.turns
        self.tokens = turns[0].tokens if len(turns) == 1 else sum(turn.tokens for turn in turns)

    @property
    def so_far(self) -> int:
        """Generated in turns that are over, and in this one when it last left an engine."""
        return self.before + self.generated

    def go_on(self, attempt: AttemptId) -> TurnScript:
        """The same response as another attempt."""
        return replace(self, attempt=attempt)

    @property
    def tool_s(self) -> float:
        """Seconds that it waits for tools, in the end."""
        return sum(turn.tool_s for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Generated and put in by tools so far, without the prompt."""
        return self.tokens + self.added

    @property
    def opens(self) -> bool:
        """Whether its environment has to begin before it can."""
        return not self._place and not self.turns[0].tokens

    @property
    def turn(self) -> ScriptedTurn:
        """The one in progress."""
        return self.turns[self._place]

    @property
    def number(self) -> int:
        """Of this turn, from 0; -1 while its environment begins."""
        return self._place if self.turns[0].tokens else self._place - 1

    @property
    def _last(self) -> bool:
        return self._place + 1 == len(self.turns)

    def request(self) -> SimulatedRequest:
        """What is left of this turn."""
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
        """This turn has been generated; whether tools are next."""
        turn = self.turns[self._place]
        self.before += turn.tokens
        self.generated = 0
        return not self._last or turn.tool_s > 0.0

    def answer(self) -> bool:
        """The tools of this turn have answered; whether another turn follows."""
        if self._last:
            return False
        self.added += self.turns[self._place].added
        self._place += 1
        return True
