"""Looks at the step in progress now and then: the live view, and who is being waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from rollpacker.runtime.attempts.attempts import DECODING, TrajectoryStage
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.step import StepRecord

_EVERY_S = 0.2


class Watch:
    """Shows the round in progress; polling costs less than a call at every event.

    Args:
        progress: the view.
        record: the step in progress.
        queue: prompts that wait for a long round.
        prompts: groups that a step needs.
        clock: the run's.
        trouble: which rewards only fail so far, if any does.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        record: Callable[[], StepRecord],
        queue: Callable[[], int],
        prompts: int,
        clock: Clock,
        trouble: Callable[[], str | None],
    ) -> None:
        self._progress = progress
        self._record = record
        self._queue = queue
        self._prompts = prompts
        self._clock = clock
        self._trouble = trouble

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            record = self._record()
            if record.end_s:
                continue
            stages = Counter(attempt.stage for attempt in record.attempts.values())
            self._progress.round(
                record.kind.value,
                len(record.trained) + len(record.dropped),
                self._prompts,
                stages[TrajectoryStage.GRADED],
                len(record.attempts),
                sum(stages[stage] for stage in DECODING),
                self._queue(),
            )
            late = self._clock() - record.start_s > self._progress.patience()
            waiting = [pending(record) if late else None, self._trouble()]
            self._progress.waiting("; ".join(filter(None, waiting)) or None)


_DOING = (
    (DECODING, "response"),
    ((TrajectoryStage.ACTING,), "environment"),
    ((TrajectoryStage.GRADING,), "reward"),
)


def pending(record: StepRecord) -> str:
    """What a step is waiting for, in words: the oldest of each kind by name."""
    attempts = list(record.attempts.values())
    parts: list[str] = []
    for stages, doing in _DOING:
        waiting = [attempt for attempt in attempts if attempt.stage in stages]
        if waiting:
            first = min(waiting, key=lambda attempt: attempt.id)
            more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            parts.append(
                f"the {doing} of attempt {first.id} (prompt {first.prompt}, "
                f"worker {first.engine}){more}"
            )
    return "; ".join(parts) or "gradients and the update"
