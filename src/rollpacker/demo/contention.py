"""Measure how busy other processes keep the machine, because they disturb measured times."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rollpacker.report.compare import NOISY


class Contention:
    """Measure the CPU time of other processes from now on, by the kernel's count ``stat``."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began = time.monotonic()
        self._before = self._others_s()

    def share(self) -> float:
        """Return other processes' share of the cores' time. 0 if the kernel has no such count.
        This process and its children do not count as others, including children that have ended."""
        seconds = time.monotonic() - self._began
        now, before = self._others_s(), self._before
        if now is None or before is None or seconds <= 0.0:
            return 0.0
        return max(0.0, now[0] - before[0]) / (seconds * now[1])

    def _others_s(self) -> tuple[float, int] | None:
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal: proc_stat(5).
        counts = [int(each) for each in lines[0].split()[1:9]]
        busy = (sum(counts) - counts[3] - counts[4]) / os.sysconf("SC_CLK_TCK")
        cores = sum(line.startswith("cpu") for line in lines) - 1
        return busy - _used_s(), cores


def _used_s() -> float:
    used = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:4])  # user and system, own and of ended children
    return used


def warning(share: float) -> str | None:
    """Return a warning if other processes took so much CPU time that times are noise."""
    if share < NOISY:
        return None
    return (
        f"WARNING other processes took {share:.0%} of the cores meanwhile. The times, the "
        "speed-up, the accepted drafts of exact and the kept responses of race are noise"
    )
