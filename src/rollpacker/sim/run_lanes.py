"""How far the engines of a recorded run had decoded: which responses ran, and which waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from rollpacker.core.types import PromptId


@dataclass(slots=True)
class Tried:
    """An attempt: ``tokens`` is a lower bound until it has ended."""

    prompt: PromptId
    index: int
    engine: int
    base: int = 0
    """Tokens that it had when it came to its engine."""
    clock: Hashable = None
    """Whose decode steps are counted: of two with one clock it is known which step was when."""
    offset: int = 0
    """Steps on that clock before its first one."""
    tokens: int = 0
    end_s: float | None = None
    graded_s: float | None = None
    reward: float | None = None
    decoding: bool = True

    @property
    def step(self) -> int:
        """The one on its clock that gave its last known token."""
        return self.offset + self.tokens - self.base


@dataclass(slots=True)
class Lane:
    """An engine that decodes at most ``most`` together; the others wait in the order in which they
    came."""

    most: int
    running: list[Tried] = field(default_factory=list[Tried])
    waiting: deque[Tried] = field(default_factory=deque[Tried])

    def join(self, tried: Tried, clock: Hashable) -> None:
        """One has come."""
        tried.clock = clock
        if len(self.running) < self.most:
            self.running.append(tried)
        else:
            self.waiting.append(tried)

    def leave(self, tried: Tried, clock: Hashable, step: int) -> None:
        """One has gone, at ``step`` of ``clock``: the next one takes its place."""
        if tried in self.waiting:
            self.waiting.remove(tried)
            return
        self.running.remove(tried)
        if self.waiting:
            following = self.waiting.popleft()
            following.clock, following.offset = clock, step
            self.running.append(following)
