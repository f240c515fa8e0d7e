"""The turns of a response as a trace tells them: lengths and latencies, scaled.

A length of ``n`` tokens becomes ``max(1, round(scale * n))``; nothing stays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors of a replay.

    Args:
        tokens: of every length, prompts included.
        time: of the latencies of tools and rewards.
    """

    tokens: float = 1.0
    time: float = 1.0

    def length(self, recorded: int) -> int:
        """Tokens that stand for ``recorded`` ones."""
        return max(1, round(self.tokens * recorded)) if recorded > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """One request to the engine.

    Args:
        prompt: tokens of the whole context before it, at least 1.
        tokens: to generate.
        cached: of ``prompt``, found in the prefix cache when it was recorded.
        tool_s: seconds until its tools have answered.
    """

    prompt: int
    tokens: int
    cached: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResponse:
    """One response: its turns in order, and seconds from its end to its reward."""

    turns: tuple[TraceTurn, ...]
    reward_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Generated over all turns."""
        return sum(turn.tokens for turn in self.turns)


def response(row: dict[str, Any], scale: Scale) -> TraceResponse:
    """What a row of ``SAMPLES`` holds of a response."""
    reward_s = scale.time * (row["reward_s"] or 0.0)
    turns: Sequence[dict[str, Any]] = row["turns"] or []
    if not turns:
        alone = TraceTurn(
            prompt=scale.length(max(1, row["prompt_tokens"] or 0)),
            tokens=scale.length(row["response_tokens"]),
        )
        return TraceResponse(turns=(alone,), reward_s=reward_s)
    tools = _tools(row["tools"] or [], len(turns))
    made: list[TraceTurn] = []
    context = row["prompt_tokens"] or 0
    for place, turn in enumerate(turns):
        if turn["prompt_tokens"] is not None:
            context = turn["prompt_tokens"]
        calls = tools[place]
        made.append(
            TraceTurn(
                prompt=scale.length(max(1, context)),
                tokens=scale.length(turn["completion_tokens"]),
                cached=round(scale.tokens * (turn["cached_tokens"] or 0)),
                # A turn's calls are made at once.
                tool_s=scale.time * max((call["latency_s"] or 0.0 for call in calls), default=0.0),
            )
        )
        context += turn["completion_tokens"] + sum(call["tokens"] or 0 for call in calls)
    return TraceResponse(turns=tuple(made), reward_s=reward_s)


def _tools(calls: Sequence[dict[str, Any]], turns: int) -> list[list[dict[str, Any]]]:
    """The calls of each turn; a call whose turn is not known belongs to the turn of its rank."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(turns)]
    for place, call in enumerate(calls):
        turn = place if call["turn"] is None else call["turn"]
        found[min(turn, turns - 1)].append(call)
    return found
