"""How a signal stops a run early, and how often a run restarts by itself."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from rollpacker.job.plan.build import Parts
from rollpacker.job.run.checkpoint_manager import CheckpointManager
from rollpacker.runtime.messages.faults import Breaker
from rollpacker.runtime.step.phase_nodes import PhaseNodes

_SHARE = 0.4
"""The share of the grace time for the checkpoint, until a checkpoint was timed."""
_ECHO_S = 0.5
"""A launcher may signal a process and then its group. Within this time, both are one signal."""


class Stopped(SystemExit):
    """A signal has stopped the run early. If it is not caught, the process exits with 128 +
    ``number``.

    Args:
        number: the first signal.
        said: whether a log line has already named the work that is kept.
    """

    def __init__(self, number: signal.Signals, *, said: bool = True) -> None:
        super().__init__(128 + number)
        self.number = number
        self.said = said


class Signals:
    """Handles SIGINT, SIGTERM and ``others`` (see ``checkpoint.signals``) while it is open. A
    signal raises ``Stopped`` in the main thread, unless ``react`` sets another reaction."""

    def __init__(self, others: Sequence[str] = ()) -> None:
        names = ("SIGINT", "SIGTERM", *(f"SIG{name}" for name in others))
        self._numbers = [signal.Signals[name] for name in names]
        self._before: dict[signal.Signals, Any] = {}
        self._at = 0.0
        self.taken: signal.Signals | None = None
        self.react()

    def react(
        self, first: Callable[[], None] | None = None, again: Callable[[], None] | None = None
    ) -> None:
        """Set the reactions to the first signal and to a further one. None raises ``Stopped``."""
        self._first = first or (lambda: self._stop(said=False))
        self._again = again or (lambda: self._stop(said=True))

    def age(self) -> float:
        """Seconds since the first signal."""
        return time.monotonic() - self._at

    def _stop(self, *, said: bool) -> None:
        assert self.taken is not None
        raise Stopped(self.taken, said=said)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.taken is None:
            self.taken, self._at = signal.Signals(number), time.monotonic()
            self._first()
        elif number == signal.SIGINT or self.age() > _ECHO_S:
            self._again()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._take) for n in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StoppedAtOnceError(RuntimeError):
    """The grace time is over, or the user sent a second signal."""


class Stopping:
    """The job's view of signals: ``interrupted`` ends it after the step, and ``hurried`` leaves
    time only for a checkpoint. ``step`` returns the current step."""

    def __init__(
        self,
        grace_s: float,
        parts: Parts,
        phases: PhaseNodes,
        signals: Signals,
        manager: CheckpointManager,
        step: Callable[[], int],
        breaker: Breaker,
    ) -> None:
        self._grace_s = grace_s
        self._parts = parts
        self._phases = phases
        self._signals = signals
        self._manager = manager
        self._step = step
        self._breaker = breaker
        self.interrupted = False
        self.hurried = False

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._signals.react(
            lambda: loop.call_soon_threadsafe(self._stop) and None,
            lambda: loop.call_soon_threadsafe(self._stop_at_once) and None,
        )

    def _stop(self) -> None:
        """End after this step. A signal other than Ctrl-C also starts the grace time."""
        taken = self._signals.taken
        assert taken is not None
        self.interrupted = True
        self._phases.interrupt()
        say = self._parts.log.progress.note
        if taken == signal.SIGINT:
            say("interrupted: finishing the step, then a checkpoint. Ctrl-C again stops at once.")
            return
        grace = self._grace_s
        say(f"{taken.name}: a checkpoint follows within {grace:g} s, after the step if it fits")
        loop = asyncio.get_running_loop()
        left = grace - self._signals.age()
        reserve = max(_SHARE * grace, 2 * self._manager.slowest_s)
        loop.call_later(left - reserve, self._hurry)
        loop.call_later(left, self._stop_at_once)

    def _hurry(self) -> None:
        self.hurried = True
        self._phases.interrupt()
        self._parts.driver.drop("the step")
        if self._parts.evaluator is not None:
            self._parts.evaluator.drop()

    def _stop_at_once(self) -> None:
        """Lose all work after the last checkpoint: no time is left, or a second signal came."""
        taken, saved = self._signals.taken, self._manager.saved
        assert taken is not None
        lost = self._step() - max(saved, 0)
        kept = f"checkpoint-{saved} is kept" if saved >= 0 else "there is no checkpoint yet"
        also = f", the {lost} steps after it are lost" if lost else ""
        self._parts.log.progress.note(
            f"stopped at once by {taken.name}: {kept}{also}. Continue with --resume auto."
        )
        self._breaker.trip(StoppedAtOnceError())


class Restarts:
    """Counts restarts without a newer checkpoint in between, up to ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._newest = -1
        self._begun = False
        self._raised = ""

    def begin(self) -> None:
        """Allow restarts. A run that fails before its first step has a mistake in it."""
        self._begun = True

    def again(self, newest: int, error: Exception) -> bool:
        """Whether to start again. Not if code has raised the same ``error`` twice. ``newest`` is
        the step of the newest checkpoint, -1 if there is none."""
        if newest > self._newest:
            self._newest, self._used, self._raised = newest, 0, ""
        before, self._raised = self._raised, str(error).partition("Traceback")[2]
        repeats = before and before == self._raised
        if not self._begun or repeats or self._used >= self._limit:
            return False
        self._used += 1
        return True

    def __str__(self) -> str:
        where = "the beginning" if self._newest < 0 else f"checkpoint-{self._newest}"
        count = f"{self._used} of cluster.restarts={self._limit}"
        return f"the run starts again from {where} ({count})"
