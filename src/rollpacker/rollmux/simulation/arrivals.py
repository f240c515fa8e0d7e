"""Expected future jobs: as many as on the last day, and like them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from rollpacker.rollmux.model.cluster import Cluster
from rollpacker.rollmux.model.jobs import JobSpec

LATELY_S = 86_400.0  # one day, since clusters have a daily rhythm
FORESEEN_S = 2 * LATELY_S
"""No later jobs are expected, so that a simulation with a growing queue ends."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A Poisson process of jobs like the recent ones, ``every_s`` seconds apart on average."""

    like: tuple[JobSpec, ...]
    every_s: float

    def draw(self, now: float, random: np.random.Generator) -> Iterator[tuple[float, JobSpec]]:
        """Arrival times and specifications for ``FORESEEN_S``."""
        number, end = 0, now + FORESEEN_S
        while self.like:
            now += float(random.exponential(self.every_s))
            if now > end:
                break
            spec = self.like[int(random.integers(len(self.like)))]
            # Nodes may have gone since the job came, and a refusal would stop the simulation.
            yield now, replace(spec, id=f"{spec.id} again {number}", too_large="wait")
            number += 1


NOBODY = Arrivals(like=(), every_s=LATELY_S)


def lately(cluster: Cluster, now: float) -> Arrivals:
    """The arrivals expected from the last day's jobs.

    Jobs that are over do not count, since a job of minutes hardly delays others. A cluster younger
    than a day counts as one with few jobs.
    """
    like = tuple(job.spec for job in cluster.jobs.values() if job.submitted > now - LATELY_S)
    return Arrivals(like, LATELY_S / len(like)) if like else NOBODY
