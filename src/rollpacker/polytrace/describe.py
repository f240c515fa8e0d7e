"""Describe a workload in numbers and in sentences."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.schema import Trace, TraceError
from rollpacker.polytrace.statistics import (
    Drift,
    Floats,
    Interval,
    dependence,
    drift,
    finished,
    intervals,
    known_cap,
    lengths_of,
    read_of,
    tail_index,
    tail_prediction,
    visits,
)

# --- A synchronous rollout round: who waits, and how loads differ

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Engines of a rollout. A decode step of B sequences takes ``base_s + per_sequence_s * B``.
    ``workers``: engines. Prompts are dealt to them in equal runs. ``slots``: sequences that an
    engine decodes at once."""

    workers: int = 8
    slots: int = 256
    base_s: float = 0.01
    per_sequence_s: float = 6e-5

    def __post_init__(self) -> None:
        if self.workers < 1 or self.slots < 1:
            raise ValueError("layout: workers and slots must be at least 1")
        if self.base_s <= 0.0 or self.per_sequence_s < 0.0:
            raise ValueError("layout: base_s must be > 0 and per_sequence_s >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousRound:
    """One synchronous round.

    Args:
        seconds: until the last engine is done.
        idle: share of the engines' time after an engine's last response.
        bubble: share of the decode slots' time that is empty, including idle engines.
    """

    seconds: float
    idle: float
    bubble: float


def synchronous_round(lengths: Ints, layout: Layout) -> SynchronousRound:
    """Decode responses of these lengths, in prompt order, without aborts and prefill. Empty
    responses take no time. ``lengths``: tokens, shape (n,)."""
    shares = np.array_split(lengths, layout.workers)
    most = max(share.size for share in shares)
    busy, slot_time = np.array([_engine(share, layout) for share in shares]).T
    seconds = float(busy.max())
    if seconds == 0.0:
        return SynchronousRound(seconds=0.0, idle=0.0, bubble=0.0)
    slots = min(layout.slots, most)
    return SynchronousRound(
        seconds=seconds,
        idle=1.0 - float(busy.mean()) / seconds,
        bubble=1.0 - float(slot_time.sum()) / (seconds * layout.workers * slots),
    )


def synchronous_rounds(samples: pl.DataFrame, layout: Layout) -> dict[int, SynchronousRound]:
    """Return the round of each step. ``samples`` are in prompt order, steps together."""
    lengths = samples.group_by("step", maintain_order=True).agg("response_tokens")
    return {
        step: synchronous_round(np.asarray(tokens, np.int64), layout)
        for step, tokens in lengths.iter_rows()
    }


def _engine(lengths: Ints, layout: Layout) -> tuple[float, float]:
    if lengths.size == 0:
        return 0.0, 0.0
    starts = _admitted(lengths, layout.slots)
    times = np.concatenate([starts, starts + lengths])
    changes = np.concatenate([np.ones(lengths.size), -np.ones(lengths.size)])
    order = np.argsort(times, kind="stable")
    batch = changes[order].cumsum()[:-1]
    steps = np.diff(times[order])
    seconds = steps * (layout.base_s + layout.per_sequence_s * batch)
    return float(seconds[batch > 0].sum()), float(seconds @ batch)


def _admitted(lengths: Ints, slots: int) -> Ints:
    starts = np.zeros(lengths.size, np.int64)
    ends = [int(length) for length in lengths[:slots]]
    heapq.heapify(ends)
    for place in range(slots, lengths.size):
        starts[place] = ends[0]
        heapq.heapreplace(ends, ends[0] + int(lengths[place]))
    return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Busiest data-parallel rank's tokens over the mean rank's, averaged over steps. 1 if even.
    ``balanced``: longest first to the least loaded rank."""

    as_dealt: float
    balanced: float


def imbalance(samples: pl.DataFrame, workers: int) -> Imbalance:
    """Return the load of the trace's ranks, or of ``workers`` equal runs of prompts without
    ranks. A response counts its prompt and its tokens, as in training."""
    found = np.array([_step_imbalance(step, workers) for step in samples.partition_by("step")])
    return Imbalance(as_dealt=float(found[:, 0].mean()), balanced=float(found[:, 1].mean()))


def _step_imbalance(step: pl.DataFrame, workers: int) -> tuple[float, float]:
    tokens = step["prompt_tokens"].fill_null(0) + step["response_tokens"]
    loads = tokens.to_numpy().astype(np.float64)
    recorded = step["dp_rank"]
    if recorded.null_count() or recorded.n_unique() < 2:
        ranks = np.arange(loads.size) * workers // loads.size
        count = workers
    else:
        ranks = recorded.rank("dense").to_numpy().astype(np.int64) - 1
        count = int(ranks.max()) + 1
    mean = loads.sum() / count
    if mean == 0.0:
        return 1.0, 1.0
    dealt = np.bincount(ranks, loads, count)
    return float(dealt.max() / mean), _balanced(loads, count) / mean


def _balanced(loads: Floats, ranks: int) -> float:
    heap = [0.0] * ranks
    for load in np.sort(loads)[::-1].tolist():
        heapq.heapreplace(heap, heap[0] + load)
    return max(heap)


# --- Shares of rewards, tools and the prefix cache


def tool_latency_share(samples: pl.DataFrame) -> float | None:
    """Return tool seconds over tool and engine seconds of all responses. None without times."""
    tools = samples.select(pl.col("tools").explode().struct.field("latency_s").sum()).item()
    engine = samples.select(pl.col("turns").explode().struct.field("latency_s").sum()).item()
    total = (tools or 0.0) + (engine or 0.0)
    return tools / total if tools is not None and engine and total > 0.0 else None


def prefix_cache_share(samples: pl.DataFrame) -> float | None:
    """Return the share of turns' prompt tokens found in the prefix cache. None without records."""
    turns = samples.select(pl.col("turns").explode()).to_series().struct.unnest()
    known = turns.drop_nulls(["cached_tokens", "prompt_tokens"])
    total = int(known["prompt_tokens"].cast(pl.Int64).sum())
    return int(known["cached_tokens"].cast(pl.Int64).sum()) / total if total else None


def reward_time_share(
    samples: pl.DataFrame, batches: pl.DataFrame, rounds: dict[int, SynchronousRound]
) -> float | None:
    """Return reward seconds over reward and rollout seconds, as if one followed the other.

    Rewards of a step: its slowest rank's batch, else its slowest response. Rollout: from the first
    start to the last end if recorded, else the round under the layout. None without timings.
    """
    reward_s, rollout_s = 0.0, 0.0
    slowest = dict(batches.group_by("step").agg(pl.col("reward_time_s").max()).iter_rows())
    for (step,), responses in samples.group_by("step", maintain_order=True):
        number = int(str(step))
        seconds = slowest.get(number)
        if seconds is None:
            graded = responses["reward_s"].drop_nulls().to_numpy()
            seconds = float(graded.max()) if graded.size else None
        if seconds is None:
            continue
        reward_s += float(seconds)
        rollout_s += _recorded(responses) or rounds[number].seconds
    total = reward_s + rollout_s
    return reward_s / total if total > 0.0 else None


def _recorded(responses: pl.DataFrame) -> float | None:
    times = responses.drop_nulls(["start_s", "end_s"])
    if times.height < responses.height or times.height == 0:
        return None
    start, end = times["start_s"].to_numpy(), times["end_s"].to_numpy()
    return float(np.max(end) - np.min(start))


# --- The report of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One task of a trace. Lengths are in tokens. Values that the trace lacks are None.

    Args:
        responses: finished responses. The other values are theirs.
        aborted: responses left out, since only a lower bound of their length is known.
        max_over_median: ``max / p50``, with a median of at least 1.
        cap_guessed: the cap is not recorded. It is the longest length, which several share.
        cap_share: share of truncated responses.
        groups: prompts of a step with several responses.
        icc: intraclass correlation of length within a prompt. It may be below 0 by chance.
        tail_index: Hill's exponent. The smaller it is, the heavier the tail.
        tail_auc_first: see ``TailPrediction``.
        idle_fraction: see ``SynchronousRound``, of all rounds together.
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
    """Characterise every task of a trace. Filtered responses count, aborted ones do not. Raises
    ``TraceError`` if a task has no finished response."""
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
    return all(samples[name].null_count() == samples.height for name in ("cap", "truncated"))


def _over(seconds: Floats, shares: list[float]) -> float:
    total = float(seconds.sum())
    return float(seconds @ shares) / total if total else 0.0


def _cap_share(samples: pl.DataFrame, cap: int | None) -> float:
    """Share of responses that the trace calls truncated, or that are at the cap if it does not."""
    at_cap = pl.lit(False) if cap is None else pl.col("response_tokens") >= cap
    return float(samples.select(pl.col("truncated").fill_null(at_cap).mean()).item())


# --- The report in sentences

_SURE = 0.01


def sentences(report: TaskReport) -> list[str]:
    """Return facts about a task, most important first."""
    parts: tuple[Callable[[TaskReport], list[str]], ...] = (
        _lengths,
        _correlation,
        _prediction,
        _waiting,
        _elsewhere,
        _drift,
        _missing,
    )
    return [sentence for part in parts for sentence in part(report)]


def _lengths(report: TaskReport) -> list[str]:
    if report.max == 0.0:
        return ["all responses are empty: the log holds no lengths"]
    told = [
        f"responses have a median of {report.p50:.0f} and a mean of {report.mean:.0f} tokens. One"
        f" in a hundred exceeds {report.p99:.0f}, and the longest, {report.max:.0f}, is"
        f" {report.max_over_median:.1f}x the median"
    ]
    if report.cap_share >= 0.01 and report.cap_guessed:
        told.append(
            f"{report.cap_share:.0%} of the responses are as long as the longest, {report.max:.0f}"
            " tokens: if that is the cap, they were cut off"
        )
    elif report.cap_share >= 0.01:
        told.append(
            f"{report.cap_share:.0%} of the responses were cut off: raise the cap, or"
            " expect truncated answers to be graded as wrong"
        )
    return told


def _correlation(report: TaskReport) -> list[str]:
    depends = dependence(report.icc, report.icc_log)
    if depends is None:
        return [_unknown_correlation(report)]
    return [
        f"length is {depends} (intraclass correlation {report.icc:.2f}, {report.icc_log:.2f} on a"
        " log scale)"
    ]


def _unknown_correlation(report: TaskReport) -> str:
    if report.groups == 0:
        return "prompts have one response each, so the spread within a prompt is unknown"
    if report.groups == 1:
        return (
            "only one prompt has several responses, so the differences between prompts are unknown"
        )
    return "all responses are equally long, so length has no correlation"


def _prediction(report: TaskReport) -> list[str]:
    told: list[str] = []
    if report.tail_auc_first is not None:
        word = _word(report.tail_auc_first)
        told.append(
            f"the first response to finish predicts the prompts of the tail {word}"
            f" (area under the curve {report.tail_auc_first:.2f})"
        )
    if report.tail_auc_history is not None:
        word = _word(report.tail_auc_history)
        told.append(f"earlier visits predict them {word} ({report.tail_auc_history:.2f})")
    return told


def _word(area: float) -> str:
    return "well" if area >= 0.8 else "somewhat" if area >= 0.65 else "hardly"


def _waiting(report: TaskReport) -> list[str]:
    told = [
        f"in synchronous rounds the engines would be idle for {report.idle_fraction:.0%}"
        f" of the time, and {report.bubble_fraction:.0%} of the decode slots' time would be empty"
    ]
    if report.load_imbalance.as_dealt >= 1.1:
        told.append(
            f"the busiest data-parallel rank has {report.load_imbalance.as_dealt:.2f}x the mean"
            f" load, and {report.load_imbalance.balanced:.2f}x if balanced by length"
        )
    return told


def _elsewhere(report: TaskReport) -> list[str]:
    told = {
        "rewards take {:.0%} of rollout and reward time if one follows the other": (
            report.reward_time_share
        ),
        "tools take {:.1%} of the time of a response": report.tool_latency_share,
        "{:.0%} of the turns' prompt tokens came from the prefix cache": report.prefix_cache_share,
    }
    return [text.format(share) for text, share in told.items() if share is not None]


def _drift(report: TaskReport) -> list[str]:
    if report.drift is None or report.drift.slope_p >= _SURE:
        return []
    way = "grow" if report.drift.slope > 0.0 else "shrink"
    return [f"lengths {way} by about {abs(report.drift.slope):.1%} per step"]


def _missing(report: TaskReport) -> list[str]:
    share = report.aborted / (report.aborted + report.responses)
    if share < 0.01:
        return []
    return [
        f"{share:.0%} of the responses were aborted and are left out: the true lengths are longer"
    ]
