"""Jobs that have not come yet: as many as lately, and like them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from rollpacker.rollmux.model.cluster import Cluster
from rollpacker.rollmux.model.jobs import JobSpec

LATELY_S = 86_400.0
"""A whole day: clusters have a daily rhythm."""
FORESEEN_S = 2 * LATELY_S
"""Nobody is expected later: where a queue only grows a run ahead has to end."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A Poisson process of jobs that are like those of late.

    Args:
        like: specifications to draw from.
        every_s: seconds from one to the next on average.
    """

    like: tuple[JobSpec, ...]
    every_s: float

    def draw(self, now: float, random: np.random.Generator) -> Iterator[tuple[float, JobSpec]]:
        """When each comes, and what it asks for, for ``FORESEEN_S``."""
        number, end = 0, now + FORESEEN_S
        while self.like:
            now += float(random.exponential(self.every_s))
            if now > end:
                break
            spec = self.like[int(random.integers(len(self.like)))]
            # Nodes may have gone since it came: it would not be refused.
            yield now, replace(spec, id=f"{spec.id} again {number}", too_large="wait")
            number += 1


NOBODY = Arrivals(like=(), every_s=LATELY_S)


def lately(cluster: Cluster, now: float) -> Arrivals:
    """What the last day's jobs make expect.

    Those that are over already do not count: who keeps nodes for minutes hardly delays anybody.
    A cluster that is younger than a day is taken to be one of few jobs, whatever came at its start.
    """
    like = tuple(job.spec for job in cluster.jobs.values() if job.submitted > now - LATELY_S)
    return Arrivals(like, LATELY_S / len(like)) if like else NOBODY
