"""Memory of this machine that is free."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """What can be had: of the machine, or of the container where that has less left."""
    free = _machine_free_bytes()
    try:
        limit = int((GROUP / "memory.max").read_text(encoding="ascii"))
        used = int((GROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def _machine_free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _elsewhere()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _elsewhere() -> int:
    """On other systems than Linux; all that there is, where psutil is not installed."""
    with suppress(ImportError):
        import psutil

        return psutil.virtual_memory().available
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
