"""What a replay does: the turns, lengths and latencies of a trace's steps, scaled.

A length of ``n`` tokens becomes ``max(1, round(scale * n))``; nothing stays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from rollpacker.polytrace.schema import Trace, TraceError


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
class Turn:
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
class Response:
    """One response: its turns in order, and seconds from its end to its reward."""

    turns: tuple[Turn, ...]
    reward_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Generated over all turns."""
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step.

    Args:
        step: its number in the trace.
        groups: responses of each prompt.
        batch_reward_s: seconds of a reward phase after the rollout, the slowest rank's.
    """

    step: int
    groups: tuple[tuple[Response, ...], ...]
    batch_reward_s: float = 0.0

    @property
    def responses(self) -> list[Response]:
        """All responses, prompt by prompt."""
        return [response for group in self.groups for response in group]

    @property
    def turns(self) -> list[Turn]:
        """All turns."""
        return [turn for response in self.responses for turn in response.turns]

    @property
    def longest(self) -> int:
        """Most tokens that one request holds, prompt and response."""
        return max(turn.prompt + turn.tokens for turn in self.turns)


def plan(
    trace: Trace,
    task: str,
    *,
    steps: int | None = None,
    scale: Scale | None = None,
    note: Callable[[str], None],
) -> list[StepPlan]:
    """The first ``steps`` steps of a task, by default all.

    Aborted responses are left out: their length is not known. ``note`` is told so, and of lengths
    that the trace lacks. Raises ``TraceError`` when no whole response is left.
    """
    mine = trace.samples.filter(pl.col("task") == task)
    whole = mine.filter(
        pl.col("state").ne_missing("aborted") & pl.col("response_tokens").is_not_null()
    )
    if whole.is_empty():
        raise TraceError(f"{task}: no whole response to replay")
    if left := mine.height - whole.height:
        note(f"{task}: {left} aborted responses are left out: their true length is not known")
    if unknown := int(whole["prompt_tokens"].null_count()):
        note(f"{task}: {unknown} responses without a prompt length: one token each")
    numbers = sorted(whole["step"].unique().to_list())[:steps]
    batches = trace.reward_batches.filter(pl.col("task") == task)
    slowest = dict(batches.group_by("step").agg(pl.col("reward_time_s").max()).iter_rows())
    used = scale or Scale()
    return [
        _step(number, whole.filter(pl.col("step") == number), slowest.get(number), used)
        for number in numbers
    ]


def _step(number: int, samples: pl.DataFrame, batch_s: float | None, scale: Scale) -> StepPlan:
    groups: dict[str, list[Response]] = {}
    for row in samples.iter_rows(named=True):
        groups.setdefault(row["prompt"], []).append(response(row, scale))
    # Where single rewards were timed, the batches' seconds hold the same work again.
    graded = samples["reward_s"].null_count() < samples.height
    return StepPlan(
        step=number,
        groups=tuple(tuple(group) for group in groups.values()),
        batch_reward_s=0.0 if graded else scale.time * (batch_s or 0.0),
    )


def response(row: dict[str, Any], scale: Scale) -> Response:
    """What a row of ``SAMPLES`` holds of a response."""
    reward_s = scale.time * (row["reward_s"] or 0.0)
    turns: Sequence[dict[str, Any]] = row["turns"] or []
    if not turns:
        alone = Turn(
            prompt=scale.length(max(1, row["prompt_tokens"] or 0)),
            tokens=scale.length(row["response_tokens"]),
        )
        return Response(turns=(alone,), reward_s=reward_s)
    tools = _tools(row["tools"] or [], len(turns))
    made: list[Turn] = []
    context = row["prompt_tokens"] or 0
    for place, turn in enumerate(turns):
        if turn["prompt_tokens"] is not None:
            context = turn["prompt_tokens"]
        calls = tools[place]
        made.append(
            Turn(
                prompt=scale.length(max(1, context)),
                tokens=scale.length(turn["completion_tokens"]),
                cached=round(scale.tokens * (turn["cached_tokens"] or 0)),
                # A turn's calls are made at once.
                tool_s=scale.time * max((call["latency_s"] or 0.0 for call in calls), default=0.0),
            )
        )
        context += turn["completion_tokens"] + sum(call["tokens"] or 0 for call in calls)
    return Response(turns=tuple(made), reward_s=reward_s)


def _tools(calls: Sequence[dict[str, Any]], turns: int) -> list[list[dict[str, Any]]]:
    """The calls of each turn; a call whose turn is not known belongs to the turn of its rank."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(turns)]
    for place, call in enumerate(calls):
        turn = place if call["turn"] is None else call["turn"]
        found[min(turn, turns - 1)].append(call)
    return found
