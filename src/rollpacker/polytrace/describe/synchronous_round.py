"""A synchronous rollout round on a given layout of engines: who waits, and how loads differ."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Engines of a rollout; a decode step of B sequences takes ``base_s + per_sequence_s * B``.

    Args:
        workers: engines; prompts are dealt to them in equal runs.
        slots: sequences that an engine decodes at once.
        base_s: seconds of a decode step whatever its batch.
        per_sequence_s: seconds that each sequence adds.
    """

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
        idle: share of the engines' time in which one has nothing left to decode.
        bubble: share of the decode slots' time that is empty, idle engines included.
    """

    seconds: float
    idle: float
    bubble: float


def synchronous_round(lengths: Ints, layout: Layout) -> SynchronousRound:
    """Decode responses of these lengths, in prompt order, none aborted; prefill is left out.

    Empty responses take no time, and nobody waits where all are empty.

    ``lengths``: tokens, shape (n,).
    """
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
    """The round of each step; ``samples`` in prompt order, steps together."""
    lengths = samples.group_by("step", maintain_order=True).agg("response_tokens")
    return {
        step: synchronous_round(np.asarray(tokens, np.int64), layout)
        for step, tokens in lengths.iter_rows()
    }


def _engine(lengths: Ints, layout: Layout) -> tuple[float, float]:
    """Seconds until an engine is done, and its decode slots' seconds in use."""
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
    """Decode step at which each sequence gets a slot, first come first served."""
    starts = np.zeros(lengths.size, np.int64)
    ends = [int(length) for length in lengths[:slots]]
    heapq.heapify(ends)
    for place in range(slots, lengths.size):
        starts[place] = ends[0]
        heapq.heapreplace(ends, ends[0] + int(lengths[place]))
    return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Busiest data-parallel rank's tokens over the mean rank's, 1 when even; mean over steps.

    Args:
        balanced: longest first to the least loaded rank.
    """

    as_dealt: float
    balanced: float


def imbalance(samples: pl.DataFrame, workers: int) -> Imbalance:
    """Load of the ranks of the trace, or of ``workers`` equal runs of prompts where it has none.

    A response counts its prompt and its tokens, as in training.
    """
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
    """Busiest rank's load when the longest go first, each to the least loaded rank."""
    heap = [0.0] * ranks
    for load in np.sort(loads)[::-1].tolist():
        heapq.heapreplace(heap, heap[0] + load)
    return max(heap)
