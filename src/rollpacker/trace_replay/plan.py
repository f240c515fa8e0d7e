"""The plan of a replay: the steps of a trace, each response with its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from rollpacker.polytrace.model.turns import Scale, TraceResponse, TraceTurn, response
from rollpacker.polytrace.schema import Trace, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. ``batch_reward_s``: seconds of a reward phase after the rollout, the slowest
    rank's."""

    step: int
    groups: tuple[tuple[TraceResponse, ...], ...]
    batch_reward_s: float = 0.0

    @property
    def responses(self) -> list[TraceResponse]:
        return [response for group in self.groups for response in group]

    @property
    def turns(self) -> list[TraceTurn]:
        return [turn for response in self.responses for turn in response.turns]

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and response."""
        return max(turn.prompt + turn.tokens for turn in self.turns)


def plan(
    trace: Trace,
    task: str,
    *,
    steps: int | None = None,
    scale: Scale | None = None,
    note: Callable[[str], None],
) -> list[StepPlan]:
    """Return the first ``steps`` steps of a task, by default all. Aborted responses are left
    out, because their length is unknown. ``note`` gets a line about them, and one about missing
    lengths. Raises ``TraceError`` if no whole response is left."""
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
    groups: dict[str, list[TraceResponse]] = {}
    for row in samples.iter_rows(named=True):
        groups.setdefault(row["prompt"], []).append(response(row, scale))
    # Where single rewards were timed, the batches' seconds hold the same work again.
    graded = samples["reward_s"].null_count() < samples.height
    return StepPlan(
        step=number,
        groups=tuple(tuple(group) for group in groups.values()),
        batch_reward_s=0.0 if graded else scale.time * (batch_s or 0.0),
    )
