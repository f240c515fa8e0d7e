"""Forecasts made beside the work: with a hundred jobs one takes a minute.

The scheduler is run ahead in another process; whoever asks gets the middle of the last runs, which
follow each other by a minute at least.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from threading import Thread

from rollpacker.rollmux.model.inventory import Fixed
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.service.state.forecast_process import ForecastProcess, asked
from rollpacker.rollmux.simulation.forecast import RUNS, ExpectedStart, expected_starts

_log = logging.getLogger(__name__)
_FRESH_S = 60.0
"""Seconds for which a forecast is taken to be right."""
_SHARE = 10.0
"""So many times what a forecast took passes before the next one."""
_SOON = 2.0
"""The same where somebody has come whom no run knows."""
_SOON_S = 5.0
"""Then seconds from one run to the next, at least."""
_AGE = 2 * RUNS
"""Pauses between runs after which one is too old to have a say."""


@dataclass(slots=True)
class _Look:
    """One run ahead from ``now``; ``found`` None until it is over."""

    ahead: ForecastProcess
    request: bytes
    now: float
    nodes: frozenset[str]
    """That were open."""
    took_s: float = 0.0
    failed: bool = False
    """Its process has ended."""
    found: dict[str, float] | None = field(default=None)

    def run(self) -> None:
        began, found = time.monotonic(), dict[str, float]()
        try:
            found = self.ahead.run(self.request)
        except (EOFError, OSError):
            self.failed = True
        finally:
            # Also where it failed: the next one is made in its time.
            self.took_s = time.monotonic() - began
            self.found = found


class Forecaster:
    """Is asked by one thread only, which never waits for a run.

    Args:
        settings: of the scheduler that it is asked about.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ahead: ForecastProcess | None = None
        self._running: _Look | None = None
        self._runs: deque[_Look] = deque(maxlen=RUNS)
        """The newest one last."""
        self._number = 0
        self._took_s = 0.0
        self._ended = float("-inf")
        """When the last run was over."""

    def look(self, scheduler: Scheduler, now: float) -> dict[str, ExpectedStart]:
        """When jobs that wait are expected to start, those left out of which nobody knows."""
        nodes = _open_nodes(scheduler)
        votes = self._votes(scheduler, now, nodes)
        known = all(any(name in vote for vote in votes) for name in scheduler.queue.jobs)
        if known and self._knows(nodes):
            pause_s = self._pause_s()
        else:
            pause_s = max(_SOON_S, _SOON * self._took_s)
        if self._running is None and now >= self._ended + pause_s:
            self._begin(scheduler, now, nodes)
        done = self._running
        if done is not None and done.found is not None:
            self._ended, self._running, self._took_s = now, None, done.took_s
            if done.failed:
                _log.warning("a forecast has failed: the next one is made in a new process")
                self.close()
            self._runs.append(done)
            while len(self._runs) > 1 and now - self._runs[0].now > _AGE * self._pause_s():
                self._runs.popleft()
            votes = self._votes(scheduler, now, nodes)
        return expected_starts(votes)

    def close(self) -> None:
        """End the process; a later run begins another."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _begin(self, scheduler: Scheduler, now: float, nodes: frozenset[str]) -> None:
        try:
            self._ahead = self._ahead or ForecastProcess(self._settings)
        except OSError as error:
            _log.warning("no forecast: its process cannot be started: %s", error)
            self._ended = now
            return
        request = asked(scheduler, now, self._number)
        self._running = _Look(self._ahead, request, now, nodes)
        self._number += 1
        Thread(target=self._running.run, name="mux-forecaster", daemon=True).start()

    def _knows(self, nodes: frozenset[str]) -> bool:
        """Whether any run knows that these are open."""
        return any(run.nodes == nodes for run in self._runs)

    def _votes(
        self, scheduler: Scheduler, now: float, nodes: frozenset[str]
    ) -> list[dict[str, float]]:
        """Runs from before a node came or went have a say as long as there is no other."""
        runs = list(self._runs)
        if self._knows(nodes):
            runs = [run for run in runs if run.nodes == nodes]
        return [self._vote(run, scheduler, now, newest=run is runs[-1]) for run in runs]

    def _pause_s(self) -> float:
        """From the end of the last run to the next, where there is no hurry."""
        return max(_FRESH_S, _SHARE * self._took_s)

    def _vote(
        self, run: _Look, scheduler: Scheduler, now: float, *, newest: bool
    ) -> dict[str, float]:
        """What a run says of those that wait since before it; one that was wrong has no say."""
        assert run.found is not None
        told: dict[str, float] = {}
        for job, wait in run.found.items():
            waiting = scheduler.queue.jobs.get(job)
            left = wait - (now - run.now)
            if waiting is None or waiting.waits_since is None or waiting.waits_since > run.now:
                continue
            if newest or left > 0.0:
                told[job] = max(left, 0.0)
        return told


def _open_nodes(scheduler: Scheduler) -> frozenset[str]:
    """By name and agent; none of a cloud, whose nodes are all alike."""
    inventory = scheduler.cluster.inventory
    slots = inventory.slots if isinstance(inventory, Fixed) else {}
    open_ones = {name: slot for name, slot in slots.items() if slot.status == "open"}
    return frozenset(f"{name} {slot.agent}" for name, slot in open_ones.items())
