"""Figure 13: rewards; the simulator has the adaptive timeout (c) only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.core.types import RoundKind
from rollpacker.sim.reproduce.jobs import PaperJob, job
from rollpacker.sim.reproduce.rows import ResultRow, missing, row
from rollpacker.sim.world.result import JobResult, mean

TITLE = "Adaptive timeouts of code rewards"
_NO_JUDGE = "the simulator's judge is a service of a fitted latency, not a model on the devices"


def jobs() -> dict[str, PaperJob]:
    """7B/8k with code rewards, at the adaptive timeout and at the longest."""
    return {
        name: job("8k", "race", domains={"code": {"reward": "code"}}, adaptive_timeout=adaptive)
        for name, adaptive in (("adaptive", True), ("fixed", False))
    }


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Rollout and rewards of short rounds; what is missing is named."""
    seconds = {
        name: mean(s.rollout_s for r in many for s in r.of(RoundKind.SHORT))
        for name, many in results.items()
    }
    fixed, adaptive = seconds["fixed"], seconds["adaptive"]
    note = (
        "programs' run times are assumed: a tenth hang, the others take 0.5 s in the median; "
        "without the start of a rollout"
    )
    return [
        missing("fig13a/MPS", 1.25, _NO_JUDGE),
        missing("fig13b/layer-wise pipelined judge, 32k", 1.4, _NO_JUDGE),
        row("fig13c/speed-up of adaptive timeouts", 1.6, fixed / adaptive, note=note),
        row("fig13c/short round at the longest timeout", 56.0, fixed, note=note),
        row("fig13c/short round at adaptive timeouts", 32.0, adaptive, note=note),
    ]
