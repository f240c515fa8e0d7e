"""Ray on this machine, for all jobs of a file of tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray


@contextmanager
def started() -> Iterator[None]:
    """Its workers find what this process finds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    path = [*filter(None, sys.path), str(Path(__file__).parent)]
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()
