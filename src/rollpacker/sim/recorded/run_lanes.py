"""How far the engines of a recorded run had decoded: which responses ran, and which waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollpacker.core.types import PromptId
from rollpacker.sim.workload.turn_script import ScriptedTurn


class Handled(NamedTuple):
    """Responses that the driver dealt with while the workers left it no core."""

    ended: int = 0
    graded: int = 0

    def since(self, earlier: Handled) -> Handled:
        """Those after an earlier count."""
        return Handled(self.ended - earlier.ended, self.graded - earlier.graded)


NONE = Handled()


class Mark(NamedTuple):
    """A moment of an engine.

    Args:
        at_s: when it was.
        sequence_s: seconds that sequences had run by then, added up.
        prefilled: tokens that turns had brought by then.
        handled: by the driver, by then.
    """

    at_s: float = 0.0
    sequence_s: float = 0.0
    prefilled: int = 0
    handled: Handled = NONE


START = Mark()


@dataclass(slots=True, eq=False)
class Tried:
    """An attempt: ``tokens`` is a lower bound until it has ended."""

    prompt: PromptId
    index: int
    engine: int
    base: int = 0
    """Tokens that it had when it came to its engine, or began its turn there."""
    added: int = 0
    """Put in by its environment so far."""
    held: int = 0
    """Of both, what its engine has when a turn has ended."""
    clock: Hashable = None
    """Whose decode steps are counted: of two with one clock it is known which step was when."""
    offset: int = 0
    """Steps on that clock before its first one."""
    entered: Mark = START
    """When it began to run."""
    lag: float | None = None
    """Steps that its turn then waited for the one in flight to end, on average; None where it came
    with the others."""
    tokens: int = 0
    end_s: float | None = None
    graded_s: float | None = None
    reward: float | None = None
    decoding: bool = True
    """It has not ended."""
    acting_s: float | None = None
    """Since when its environment is at work; None where it is not."""
    waited_s: float | None = None
    """How long its environment had been at work when it was stopped; None where it was not."""
    turns: list[ScriptedTurn] = field(default_factory=list[ScriptedTurn])
    """Those that its environment has had, begun with its beginning; empty where it has none."""

    @property
    def step(self) -> int:
        """The one on its clock that gave its last known token."""
        return self.offset + self.tokens - self.base

    def end_turn(self, now: float, tokens: int) -> None:
        """Its environment is next."""
        self.turns.append(ScriptedTurn(tokens - sum(turn.tokens for turn in self.turns)))
        self.tokens, self.acting_s, self.held = tokens, now, tokens + self.added

    def answer(self, seconds: float, added: int) -> None:
        """Its environment has answered."""
        turn = self.turns.pop() if self.turns else ScriptedTurn(0)
        self.turns.append(ScriptedTurn(turn.tokens, seconds, added))
        self.added += added

    def stop(self, now: float, tokens: int) -> None:
        """It is not wanted any more."""
        if self.acting_s is not None:
            self.waited_s = now - self.acting_s
        self.tokens, self.decoding, self.acting_s = max(self.tokens, tokens), False, None

    def end(self, now: float, tokens: int) -> None:
        """Its response is there."""
        if self.acting_s is not None:
            if self.turns:
                self.answer(now - self.acting_s, 0)
        elif self.turns:
            self.turns.append(ScriptedTurn(tokens - sum(turn.tokens for turn in self.turns)))
        self.tokens, self.decoding, self.acting_s = tokens, False, None


@dataclass(slots=True)
class Lane:
    """An engine that decodes at most ``most`` together; the others wait in the order in which they
    came."""

    most: int
    running: list[Tried] = field(default_factory=list[Tried])
    waiting: deque[Tried] = field(default_factory=deque[Tried])
    prompts: set[PromptId] = field(default_factory=set[PromptId])
    """That turns have brought."""
    prefilled: int = 0
    """Tokens that turns have brought."""
    _sequence_s: float = 0.0
    _since: float = 0.0

    def mark(self, now: float, handled: Handled) -> Mark:
        """This moment."""
        self._sequence_s += len(self.running) * (now - self._since)
        self._since = now
        return Mark(now, self._sequence_s, self.prefilled, handled)

    def join(self, tried: Tried, clock: Hashable, mark: Mark) -> None:
        """One has come."""
        tried.clock, tried.offset = clock, 0
        if len(self.running) < self.most:
            tried.entered = mark
            self.running.append(tried)
        else:
            self.waiting.append(tried)

    def leave(self, tried: Tried, clock: Hashable, step: int, mark: Mark) -> None:
        """One has gone, at ``step`` of ``clock``: the next one takes its place."""
        if tried in self.waiting:
            self.waiting.remove(tried)
            return
        self.running.remove(tried)
        if self.waiting:
            following = self.waiting.popleft()
            following.clock, following.offset, following.entered = clock, step, mark
            if following.lag is not None:
                following.lag = 0.0
            self.running.append(following)

    def bring(self, tried: Tried, prompt_tokens: int) -> None:
        """A turn comes, with what the engine does not have of it."""
        self.prefilled += tried.tokens + tried.added - tried.held
        if tried.prompt not in self.prompts:
            self.prompts.add(tried.prompt)
            self.prefilled += prompt_tokens
