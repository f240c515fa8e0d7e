"""Where jobs stand in the queue, looked up once for all who ask in the same moment."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.scheduler.queue import why_it_waits
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.simulation.forecast import ExpectedStart


class QueueView:
    """Of one moment: not to be kept."""

    def __init__(self, core: TransactionLog) -> None:
        self._core = core
        self._reasons: dict[tuple[object, ...], str] = {}

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {job: place for place, job in enumerate(self._core.queue(), 1)}

    @cached_property
    def _forecast(self) -> dict[str, ExpectedStart]:
        return self._core.forecast()

    def of(self, job: Job | None) -> dict[str, Any] | None:
        """Place, reason and forecast; None of a job that does not wait."""
        if job is None or job.waits_since is None:
            return None
        start = self._forecast.get(job.spec.id)
        return {
            "position": self._positions[job.spec.id],
            "of": len(self._positions),
            "since_s": job.waits_since,
            "reason": self._reason(job),
            "starts_in_s": None if start is None else start.middle,
            "starts_between_s": None if start is None else start.between,
        }

    def _reason(self, job: Job) -> str:
        """Jobs that ask for the same wait for the same."""
        wanted = _wanted(job.spec)
        if wanted not in self._reasons:
            self._reasons[wanted] = why_it_waits(self._core.brain.scheduler.cluster, job)
        return self._reasons[wanted]


def _wanted(spec: JobSpec) -> tuple[object, ...]:
    memory = spec.rollout_memory_gb, spec.train_memory_gb
    labels = tuple(spec.rollout_labels.items()), tuple(spec.train_labels.items())
    return spec.gangs, memory, spec.node_devices, labels
