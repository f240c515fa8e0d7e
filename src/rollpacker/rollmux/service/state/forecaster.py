"""Forecasts in the background, since with a hundred jobs one takes a minute.

Another process runs the scheduler ahead, at most about once a minute. The forecast is the median of
the last runs.
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
_FRESH_S = 60.0  # seconds for which a forecast is considered fresh
_SHARE = 10.0  # pause before the next run, in durations of the last one
_SOON = 2.0  # the same if a job has come that no run knows
_SOON_S = 5.0  # least seconds between two runs in that case
_AGE = 2 * RUNS  # pauses between runs after which a run is too old to count


@dataclass(slots=True)
class _Look:
    """One run ahead from ``now``. ``found`` is None until it is over."""

    ahead: ForecastProcess
    request: bytes
    now: float
    nodes: frozenset[str]
    took_s: float = 0.0
    failed: bool = False
    found: dict[str, float] | None = field(default=None)

    def run(self) -> None:
        began, found = time.monotonic(), dict[str, float]()
        try:
            found = self.ahead.run(self.request)
        except (EOFError, OSError):
            self.failed = True
        finally:
            # Count failed runs too, so that the next one is not made at once.
            self.took_s = time.monotonic() - began
            self.found = found


class Forecaster:
    """Called by one thread only, which never waits for a run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ahead: ForecastProcess | None = None
        self._running: _Look | None = None
        self._runs: deque[_Look] = deque(maxlen=RUNS)
        self._number = 0
        self._took_s = 0.0
        self._ended = float("-inf")

    def look(self, scheduler: Scheduler, now: float) -> dict[str, ExpectedStart]:
        """Expected starts of waiting jobs, without those that are unknown."""
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
                _log.warning("a forecast failed, so the next one gets a new process")
                self.close()
            self._runs.append(done)
            while len(self._runs) > 1 and now - self._runs[0].now > _AGE * self._pause_s():
                self._runs.popleft()
            votes = self._votes(scheduler, now, nodes)
        return expected_starts(votes)

    def close(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _begin(self, scheduler: Scheduler, now: float, nodes: frozenset[str]) -> None:
        try:
            self._ahead = self._ahead or ForecastProcess(self._settings)
        except OSError as error:
            _log.warning("no forecast, since its process cannot be started: %s", error)
            self._ended = now
            return
        request = asked(scheduler, now, self._number)
        self._running = _Look(self._ahead, request, now, nodes)
        self._number += 1
        Thread(target=self._running.run, name="mux-forecaster", daemon=True).start()

    def _knows(self, nodes: frozenset[str]) -> bool:
        return any(run.nodes == nodes for run in self._runs)

    def _votes(
        self, scheduler: Scheduler, now: float, nodes: frozenset[str]
    ) -> list[dict[str, float]]:
        """Votes of the runs. Runs with other open nodes count only if there are no others."""
        runs = list(self._runs)
        if self._knows(nodes):
            runs = [run for run in runs if run.nodes == nodes]
        return [self._vote(run, scheduler, now, newest=run is runs[-1]) for run in runs]

    def _pause_s(self) -> float:
        return max(_FRESH_S, _SHARE * self._took_s)

    def _vote(
        self, run: _Look, scheduler: Scheduler, now: float, *, newest: bool
    ) -> dict[str, float]:
        """Remaining waits of jobs that waited at the run's start. Wrong forecasts are left out."""
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
    inventory = scheduler.cluster.inventory
    slots = inventory.slots if isinstance(inventory, Fixed) else {}
    open_ones = {name: slot for name, slot in slots.items() if slot.status == "open"}
    return frozenset(f"{name} {slot.agent}" for name, slot in open_ones.items())
