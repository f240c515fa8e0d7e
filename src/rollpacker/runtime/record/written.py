"""What is written of a step that is over."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.core.types import Group
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.record.counters import Counters
from rollpacker.runtime.record.metrics import Metrics, TailMetrics, taught
from rollpacker.runtime.record.run_log import RunLog
from rollpacker.runtime.step.step import StepRecord


async def write_step(
    record: StepRecord,
    groups: Sequence[Group],
    *,
    log: RunLog,
    policy: RolloutPolicy,
    problems: Problems,
    counters: Counters,
    extra: Metrics,
) -> Metrics:
    """Write a step to every file, and count what its metrics tell; returns those.

    Args:
        record: of the step, which ``counters`` has in it.
        groups: that were trained on.
        log: the run's files.
        policy: says how lengths are bent, and warns.
        problems: how much of the epoch is drawn.
        counters: the run's.
        extra: metrics of an evaluation.
    """
    bias = policy.bias()
    tail = TailMetrics(
        round_kind=record.kind,
        long_queue=policy.queue,
        deferred=len(record.deferred),
        aborted_tokens=record.aborted_tokens(),
        kept_vs_true_len=bias.kept_vs_true_len,
        audited=bias.audited,
    )
    for alarm in bias.alarms:
        log.progress.note(f"WARNING step {record.step}: {alarm}")
    metrics = await log.step(
        record,
        groups,
        epoch=problems.source.passed,
        tail=tail,
        num_tokens=counters.num_tokens,
        extra=extra,
    )
    counters.measure(record, metrics, bias.kept_vs_true_len)
    if "emulated" not in metrics:  # there nothing is to be learned
        counters.untaught += not taught(groups)
    return metrics
