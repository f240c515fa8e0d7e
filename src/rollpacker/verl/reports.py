"""What workers tell the policy, besides events, and that all of it arrives in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, FinishReason, PromptId

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFinished:
    """A response is complete after ``seconds``; ``tokens`` of it were generated."""

    attempt: AttemptId
    tokens: int
    finish_reason: FinishReason
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopped:
    """An attempt that was told to stop ``seconds`` after it was begun has stopped.

    verl's servers don't say how many tokens they had: ``tokens`` is None where it still decoded.
    """

    attempt: AttemptId
    tokens: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All kept responses of a prompt are in the transfer queue."""

    prompt: PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A worker cannot go on; ``error`` says why."""

    error: str


Report = (
    ResponseFinished
    | AttemptStopped
    | Stored
    | Broken
    | ev.AttemptFailed
    | ev.AttemptGraded
    | ev.GradingFailed
)


class InOrder(Generic[T]):
    """Batches as they were sent: calls of an actor's coroutines may overtake each other."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def take(self, number: int, batch: T) -> Iterator[T]:
        """Batch ``number``, counted from 0, has come: those whose turn it is now."""
        self._early[number] = batch
        while self._next in self._early:
            self._next += 1
            yield self._early.pop(self._next - 1)
