"""Responses of our runs that an environment took part in, as turns and calls of a trace.

Each answer of the environment is one call; what it did after the last turn answered nobody and is
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollpacker.polytrace.formats.files.lines import Record

TOOL = "environment"
"""Name of the calls."""


class EpisodeTurn(NamedTuple):
    """``tokens`` sampled in ``latency_s`` (None where that is unknown), then ``wait_s`` until the
    environment had answered with ``added`` tokens."""

    tokens: int
    wait_s: float = 0.0
    added: int = 0
    latency_s: float | None = None


def columns(prompt_tokens: int | None, turns: Sequence[EpisodeTurn], reason: str | None) -> Record:
    """Columns ``turns`` and ``tools`` of a response that ended for this ``reason``."""
    made: list[Record] = []
    calls: list[Record] = []
    context = prompt_tokens or 0
    for place, turn in enumerate(turns):
        last = place + 1 == len(turns)
        made.append(
            {
                "prompt_tokens": context,
                "completion_tokens": turn.tokens,
                "finish_reason": reason if last else "tool_calls",
                "latency_s": None if turn.latency_s is None else round(turn.latency_s, 6),
            }
        )
        if not last:
            waited_s = round(turn.wait_s, 6)
            calls.append({"turn": place, "name": TOOL, "latency_s": waited_s, "tokens": turn.added})
        context += turn.tokens + turn.added
    return {"turns": made, "tools": calls}


def whole(turns: Sequence[EpisodeTurn], tokens: int) -> list[EpisodeTurn]:
    """With the tokens of a turn that was stopped before its end."""
    rest = tokens - sum(turn.tokens for turn in turns)
    return [*turns, EpisodeTurn(rest)] if rest > 0 else [*turns]


@dataclass(slots=True)
class RecordedEpisode:
    """An attempt's turns, from a journal's events."""

    since_s: float
    """When its engine got it."""
    opening_s: float = 0.0
    """Until its environment had begun."""
    turns: list[EpisodeTurn] = field(default_factory=list[EpisodeTurn])
    acting: bool = False
    """Its environment is at work."""

    def end_turn(self, now: float, tokens: int) -> None:
        """A turn has ended, with so many tokens sampled in all."""
        sampled = tokens - sum(turn.tokens for turn in self.turns)
        self.turns.append(EpisodeTurn(sampled, latency_s=now - self.since_s))
        self.since_s, self.acting = now, True

    def answer(self, seconds: float, added: int) -> None:
        """The environment has answered."""
        self.acting = False
        if not self.turns:
            self.opening_s = seconds
        else:
            self.turns[-1] = self.turns[-1]._replace(wait_s=seconds, added=added)

    def go_on(self, now: float) -> None:
        """An engine has the next turn."""
        self.since_s = now

    def end(self, now: float, tokens: int, *, stopped: bool) -> None:
        """The response is there, or it was ``stopped``."""
        if self.acting:
            if not stopped:
                self.answer(now - self.since_s, 0)
        elif (rest := whole(self.turns, tokens)) != self.turns:
            self.turns = rest
            if not stopped:
                self.turns[-1] = EpisodeTurn(rest[-1].tokens, latency_s=now - self.since_s)

    @property
    def extra(self) -> Record:
        """Seconds until its environment had begun, and had heard of the end."""
        ending_s = self.turns[-1].wait_s if self.turns else 0.0
        return {"opening_s": self.opening_s, "ending_s": ending_s}
