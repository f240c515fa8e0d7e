"""Where a workload's time goes besides decoding: rewards, tools, and prefills spared by a cache."""

from __future__ import annotations

import numpy as np
import polars as pl

from rollpacker.polytrace.describe.synchronous_round import SynchronousRound


def tool_latency_share(samples: pl.DataFrame) -> float | None:
    """Tool seconds over tool and engine seconds of all responses; None where not timed."""
    tools = samples.select(pl.col("tools").explode().struct.field("latency_s").sum()).item()
    engine = samples.select(pl.col("turns").explode().struct.field("latency_s").sum()).item()
    total = (tools or 0.0) + (engine or 0.0)
    return tools / total if tools is not None and engine and total > 0.0 else None


def prefix_cache_share(samples: pl.DataFrame) -> float | None:
    """Prompt tokens of turns found in the prefix cache over all; None where not recorded."""
    turns = samples.select(pl.col("turns").explode()).to_series().struct.unnest()
    known = turns.drop_nulls(["cached_tokens", "prompt_tokens"])
    total = int(known["prompt_tokens"].cast(pl.Int64).sum())
    return int(known["cached_tokens"].cast(pl.Int64).sum()) / total if total else None


def reward_time_share(
    samples: pl.DataFrame, batches: pl.DataFrame, rounds: dict[int, SynchronousRound]
) -> float | None:
    """Reward seconds over reward and rollout seconds, as if one followed the other.

    Rewards of a step: its slowest rank's batch, else its slowest response. Rollout: from the first
    start to the last end where recorded, else the round under the layout. None without timings.
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
