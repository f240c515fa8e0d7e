"""Which worker an attempt runs on."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.core.types import AttemptId, WorkerId


class Placement:
    """Keeps workers evenly loaded, by running attempts; ties go to the lowest id."""

    def __init__(self, workers: Sequence[WorkerId]) -> None:
        self._running: dict[WorkerId, set[AttemptId]] = {worker: set() for worker in workers}
        self._worker: dict[AttemptId, WorkerId] = {}
        self._retired: set[WorkerId] = set()

    @property
    def workers(self) -> int:
        """Number of live workers."""
        return len(self._running)

    def choose(self) -> WorkerId:
        """The least loaded worker, a retired one only when there is no other.

        Raises ``RuntimeError`` when none is left.
        """
        if not self._running:
            raise RuntimeError("every worker has died; the run cannot go on")

        def load(worker: WorkerId) -> tuple[bool, int, WorkerId]:
            return worker in self._retired, len(self._running[worker]), worker

        return min(self._running, key=load)

    def started(self, attempt: AttemptId, worker: WorkerId) -> None:
        """An attempt begins on a worker."""
        self._running[worker].add(attempt)
        self._worker[attempt] = worker

    def ended(self, attempt: AttemptId) -> None:
        """An attempt no longer decodes; unknown ones are ignored."""
        worker = self._worker.pop(attempt, None)
        if worker is not None and worker in self._running:
            self._running[worker].discard(attempt)

    def moved(self, attempt: AttemptId, worker: WorkerId) -> None:
        """An attempt has changed its worker."""
        if attempt in self._worker and worker in self._running:
            self.ended(attempt)
            self.started(attempt, worker)

    def retire(self, worker: WorkerId) -> None:
        """Start nothing on a worker any more; what it runs is moving, but may die with it."""
        self._retired.add(worker)

    def lose(self, worker: WorkerId) -> list[AttemptId]:
        """Forget a dead worker; returns what ran there, oldest first."""
        lost = sorted(self._running.pop(worker, set()))
        for attempt in lost:
            self._worker.pop(attempt)
        return lost
