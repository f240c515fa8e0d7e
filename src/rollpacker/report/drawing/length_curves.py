"""Response lengths: what was kept against what sampling would give without aborts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rollpacker.policy.lengths import (
    CENSORED,
    FINISHED,
    TRUNCATED,
    KaplanMeier,
    Observations,
)

_ENDS = {"stop": FINISHED, "length": TRUNCATED, "abort": CENSORED}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthCurves:
    """Lengths of a run's kept responses, and the estimate without aborts."""

    kept: KaplanMeier
    true: KaplanMeier

    def ratio(self) -> float:
        """Kept mean length / estimated true mean length."""
        return self.kept.mean() / max(self.true.mean(), 1e-9)


def length_facts(curves: LengthCurves | None) -> dict[str, Any]:
    """Means in tokens, and shares that were cut off; None where there are no curves."""
    return {
        "kept_mean_tokens": curves and curves.kept.mean(),
        "true_mean_tokens": curves and curves.true.mean(),
        "kept_vs_true_len": curves and curves.ratio(),
        "kept_truncated": curves and curves.kept.truncated,
        "true_truncated": curves and curves.true.truncated,
    }


def length_curves(samples: pl.DataFrame, cap: int | None) -> LengthCurves | None:
    """Curves of all steps together, None where nothing was kept; aborted attempts count as
    right-censored, and those that were carried over where they ended.

    Args:
        samples: columns ``tokens, state, finish_reason, round_kind``.
        cap: longest response in tokens; None where the config leaves it to the model.
    """
    ended = samples.filter(
        ~pl.col("state").is_in(["failed", "carried"]) & pl.col("finish_reason").is_in(list(_ENDS))
    )
    long = pl.col("round_kind") == "long"
    kept = _observed(ended.filter(pl.col("state") == "kept"))
    if not len(kept):
        return None
    fresh, rerun = _observed(ended.filter(~long)), _observed(ended.filter(long))
    return LengthCurves(
        kept=KaplanMeier.fit(kept, Observations.of([]), cap),
        true=KaplanMeier.fit(fresh, rerun, cap),
    )


def _observed(samples: pl.DataFrame) -> Observations:
    ends = [_ENDS[reason] for reason in samples["finish_reason"]]
    return Observations.of(samples["tokens"].to_numpy().astype(np.int64), ends)
