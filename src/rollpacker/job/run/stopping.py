"""How a signal ends a run: after the step, within the grace time, or at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from rollpacker.job.plan.build import Parts
from rollpacker.job.run.keep import CheckpointManager
from rollpacker.job.run.signals import Signals
from rollpacker.runtime.messages.breaker import Breaker
from rollpacker.runtime.step.node_lease import PhaseNodes

_SHARE = 0.4
"""Of the grace time, kept for the checkpoint until it is known how long one takes."""


class StoppedAtOnceError(RuntimeError):
    """The grace time is over, or the user cannot wait."""


class Stopping:
    """What the job asks at its forks: ``interrupted`` ends it after the step, ``hurried`` with no
    time but for a checkpoint; ``step`` tells how far it is.
    """

    def __init__(
        self,
        grace_s: float,
        parts: Parts,
        phases: PhaseNodes,
        signals: Signals,
        keeper: CheckpointManager,
        step: Callable[[], int],
    ) -> None:
        self._grace_s = grace_s
        self._parts = parts
        self._phases = phases
        self._signals = signals
        self._keeper = keeper
        self._step = step
        self.interrupted = False
        self.hurried = False

    def stop(self, breaker: Breaker) -> None:
        """A signal: end after this step; but for Ctrl-C, within the grace time."""
        taken = self._signals.taken
        assert taken is not None
        self.interrupted = True
        self._phases.interrupt()
        say = self._parts.log.progress.note
        if taken == signal.SIGINT:
            say("interrupted: finishing the step, then a checkpoint; once more stops at once")
            return
        grace = self._grace_s
        say(f"{taken.name}: a checkpoint within {grace:g} s; the step is finished if it fits")
        loop = asyncio.get_running_loop()
        left = grace - self._signals.age()
        reserve = max(_SHARE * grace, 2 * self._keeper.slowest_s)
        loop.call_later(left - reserve, self._hurry)
        loop.call_later(left, self.stop_at_once, breaker)

    def _hurry(self) -> None:
        """No more time but for a checkpoint."""
        self.hurried = True
        self._phases.interrupt()
        self._parts.rollout.drop()
        if self._parts.evaluator is not None:
            self._parts.evaluator.drop()

    def stop_at_once(self, breaker: Breaker) -> None:
        """The grace time is over, or a second signal came: what is not kept yet is lost."""
        taken, saved = self._signals.taken, self._keeper.saved
        assert taken is not None
        lost = self._step() - max(saved, 0)
        kept = f"checkpoint-{saved} is kept" if saved >= 0 else "there is no checkpoint yet"
        also = f", the {lost} steps after it are lost" if lost else ""
        self._parts.log.progress.note(
            f"stopped at once by {taken.name}: {kept}{also}; go on with --resume auto"
        )
        breaker.trip(StoppedAtOnceError())
