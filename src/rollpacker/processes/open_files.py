"""How many files a process may have open: a driver has one for each worker, an agent some."""

from __future__ import annotations

import os
import resource

_OTHERS = 256
"""That it opens besides, at most."""


def allow_files(count: int) -> None:
    """Let this process open so many more, if the system lets it open fewer by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + _OTHERS
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
