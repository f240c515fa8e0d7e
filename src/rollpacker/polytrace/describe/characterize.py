"""What a workload is like: lengths, correlation, drift, waiting.

What tail batching would gain on it is simulated (``sim.estimate``): there is one estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rollpacker.polytrace.describe.shares import (
    prefix_cache_share,
    reward_time_share,
    tool_latency_share,
)
from rollpacker.polytrace.describe.synchronous_round import (
    Imbalance,
    Layout,
    imbalance,
    synchronous_rounds,
)
from rollpacker.polytrace.schema import Trace, TraceError
from rollpacker.polytrace.statistics.bootstrap import Interval, intervals
from rollpacker.polytrace.statistics.prediction import tail_prediction
from rollpacker.polytrace.statistics.statistics import (
    Drift,
    Floats,
    drift,
    finished,
    known_cap,
    lengths_of,
    read_of,
    tail_index,
    visits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One task of a trace. Lengths in tokens; None where the trace does not tell.

    Args:
        responses: finished responses; the figures are theirs.
        aborted: responses left out, since only a lower bound of their length is known.
        mean: of the response lengths, as are ``p50`` to ``max``.
        max_over_median: ``max / p50``, a median of 0 taken as 1.
        cap_guessed: it is the longest response, which others are as long as.
        cap_share: share of responses that were cut off.
        groups: prompts of a step with several responses.
        icc: intraclass correlation of length within a prompt; below 0 by chance.
        tail_index: Hill's exponent; the smaller, the heavier the tail.
        tail_auc_first: see ``prediction.TailPrediction``.
        idle_fraction: see ``synchronous_round.SynchronousRound``; of all rounds together.
        reward_time_share: see ``shares``.
    """

    responses: int
    aborted: int
    prompts: int
    steps: int
    mean: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: float
    max_over_median: float
    cap: int | None
    cap_guessed: bool
    cap_share: float
    groups: int
    icc: float | None
    icc_log: float | None
    tail_index: float | None
    tail_auc_first: float | None
    tail_auc_fourth: float | None
    tail_auc_history: float | None
    drift: Drift | None
    idle_fraction: float
    bubble_fraction: float
    load_imbalance: Imbalance
    reward_time_share: float | None
    tool_latency_share: float | None
    prefix_cache_share: float | None
    intervals: dict[str, Interval]


_UNUSED = ("task", "extra", "domain", "reward_kind")


def characterize(trace: Trace, layout: Layout | None = None) -> dict[str, TaskReport]:
    """Characterise every task of a trace.

    Raises ``TraceError`` when a task has no finished response.

    Args:
        trace: the workload; filtered responses count, aborted ones do not.
        layout: engines of the rollout, for who waits.
    """
    chosen = layout or Layout()
    return {task: _task(task, trace, chosen) for task in trace.tasks}


def _task(task: str, trace: Trace, layout: Layout) -> TaskReport:
    # Each of the steps below copies it, and these are the widest of its columns.
    every = trace.samples.lazy().filter(pl.col("task") == task).drop(_UNUSED).collect()
    every = every.with_columns(pl.col("prompt").rank("dense"))  # numbers in the names' order
    samples = finished(every).sort("step", "prompt", "index")
    if samples.height == 0:
        raise TraceError(f"task {task!r}: no finished response to characterise")
    tokens = lengths_of(samples)
    told = samples["response_tokens"].to_numpy().astype(np.float64)
    cap = known_cap(samples)
    read = read_of(every)
    rounds = synchronous_rounds(samples, layout)
    seconds = np.array([each.seconds for each in rounds.values()])
    batches = trace.reward_batches.filter(pl.col("task") == task)
    p50, p75, p90, p99 = (float(value) for value in np.quantile(told, [0.5, 0.75, 0.9, 0.99]))
    prediction = tail_prediction(samples)
    return TaskReport(
        responses=read.responses,
        aborted=read.aborted,
        prompts=samples["prompt"].n_unique(),
        steps=len(rounds),
        mean=float(told.mean()),
        p50=p50,
        p75=p75,
        p90=p90,
        p99=p99,
        max=float(told.max()),
        max_over_median=float(told.max()) / max(p50, 1.0),
        cap=cap,
        cap_guessed=cap is not None and _untold(samples),
        cap_share=_cap_share(samples, cap),
        groups=int(np.sum(np.bincount(visits(samples)) > 1)),
        icc=read.icc,
        icc_log=read.icc_log,
        tail_index=tail_index(tokens, cap),
        tail_auc_first=prediction.first,
        tail_auc_fourth=prediction.fourth,
        tail_auc_history=prediction.history,
        drift=drift(samples),
        idle_fraction=_over(seconds, [each.idle for each in rounds.values()]),
        bubble_fraction=_over(seconds, [each.bubble for each in rounds.values()]),
        load_imbalance=imbalance(samples, layout.workers),
        reward_time_share=reward_time_share(samples, batches, rounds),
        tool_latency_share=tool_latency_share(samples),
        prefix_cache_share=prefix_cache_share(samples),
        intervals=intervals(tokens, visits(samples)),
    )


def _untold(samples: pl.DataFrame) -> bool:
    """Whether nothing is logged of the cap, nor of who was cut off."""
    return all(samples[name].null_count() == samples.height for name in ("cap", "truncated"))


def _over(seconds: Floats, shares: list[float]) -> float:
    """Mean of the rounds' shares, by their seconds; 0 where none takes time."""
    total = float(seconds.sum())
    return float(seconds @ shares) / total if total else 0.0


def _cap_share(samples: pl.DataFrame, cap: int | None) -> float:
    """Share that the trace calls truncated, or at the cap where it does not tell."""
    at_cap = pl.lit(False) if cap is None else pl.col("response_tokens") >= cap
    return float(samples.select(pl.col("truncated").fill_null(at_cap).mean()).item())
