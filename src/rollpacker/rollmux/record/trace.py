"""Traces of RL jobs: trace files, and a synthetic generator after the Philly trace.

The generator borrows only the shape from Jeon et al. (2019): arrivals with a daily rhythm and
heavy-tailed durations. Phases, gangs and slack are our assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.codec import plain
from rollpacker.rollmux.model.jobs import JobSpec, host_memory_gb

HOUR = 3600.0
_MODELS_B = {1: (7.0, 8.0, 14.0), 2: (14.0, 32.0), 4: (32.0, 72.0)}
_GANGS = ((1, 2, 4), (0.5, 0.3, 0.2))


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job with the true seconds alone of every rollout (sync included) and training phase."""

    spec: JobSpec
    arrival_s: float
    rollout_s: NDArray[np.float64]
    train_s: NDArray[np.float64]

    @property
    def solo_s(self) -> float:
        return float(self.rollout_s.sum() + self.train_s.sum())

    def to_json(self) -> dict[str, Any]:
        """A line of a trace file, or a job of an event log's meta line."""
        return {
            **plain(self.spec),
            "arrival_s": self.arrival_s,
            "rollout_s": self.rollout_s.tolist(),
            "train_s": self.train_s.tolist(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Philly:
    """Parameters of the generator.

    Args:
        days: days of arrivals.
        nodes: gangs of 1 node, or of 1, 2 and 4 (the same for rollout and training).
        slo: range of the allowed slowdown, uniform.
        cycles: ``mixed`` for worst iterations of 100 to 900 s, ``one`` for 350 to 450 s.
        bimodal: three short rollouts, then a long one, as in tail batching.
        mean_hours: mean duration alone. 36 hours give about the published cost of solo
            disaggregation
            with one-node jobs ($936/h).
    """

    jobs: int = 200
    days: float = 14.0
    nodes: Literal["1", "mixed"] = "1"
    slo: tuple[float, float] = (1.0, 2.0)
    cycles: Literal["mixed", "one"] = "mixed"
    bimodal: bool = False
    mean_hours: float = 36.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on bad sizes and ranges."""
        if self.jobs < 1 or self.days <= 0:
            raise ValueError("trace: jobs must be 1 or more and days positive")
        if not 1.0 <= self.slo[0] <= self.slo[1]:
            raise ValueError(f"trace: slo must be LOW,HIGH with 1 <= LOW <= HIGH, got {self.slo}")


def philly(config: Philly, rng: np.random.Generator) -> list[TraceJob]:
    """A synthetic trace, by arrival."""
    arrivals = _arrivals(config, rng)
    return [_job(config, f"job{n:04d}", float(at), rng) for n, at in enumerate(arrivals)]


def _arrivals(config: Philly, rng: np.random.Generator) -> NDArray[np.float64]:
    """Uniform over the days, thinned to a daily rhythm: three times as many at noon as at night."""
    times: list[float] = []
    while len(times) < config.jobs:
        at = rng.uniform(0.0, config.days * 24.0)
        if rng.uniform(0.0, 1.5) < 1.0 - 0.5 * np.cos(2 * np.pi * at / 24.0):
            times.append(round(at * HOUR, 3))
    return np.sort(np.array(times))


def _job(config: Philly, name: str, arrival_s: float, rng: np.random.Generator) -> TraceJob:
    gang = 1 if config.nodes == "1" else int(rng.choice(_GANGS[0], p=_GANGS[1]))
    low, high = (100.0, 900.0) if config.cycles == "mixed" else (350.0, 450.0)
    worst = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    share = rng.uniform(0.5, 0.8)
    worst_r, worst_t = round(worst * share, 3), round(worst * (1.0 - share), 3)
    mean_r, mean_t = worst_r * rng.uniform(0.6, 0.95), worst_t * rng.uniform(0.7, 0.95)
    hours = rng.lognormal(np.log(config.mean_hours) - 0.5, 1.0)
    hours = float(np.clip(hours, 0.5, 5.0 * config.mean_hours))
    iterations = max(3, round(hours * HOUR / (mean_r + mean_t)))
    memory = host_memory_gb(float(rng.choice(_MODELS_B[gang])), train_nodes=gang)
    spec = JobSpec(
        id=name,
        worst_rollout_s=worst_r,
        worst_train_s=worst_t,
        rollout_nodes=gang,
        train_nodes=gang,
        slo=round(float(rng.uniform(*config.slo)), 4),
        iterations=iterations,
        rollout_memory_gb=round(memory[0], 1),
        train_memory_gb=round(memory[1], 1),
    )
    noise = rng.lognormal(0.0, 0.12, iterations)
    if config.bimodal:
        noise *= np.where(np.arange(iterations) % 4 == 3, 1.9, 0.7)
    rollout = np.minimum(mean_r * noise, worst_r).round(3)
    train = np.minimum(mean_t * rng.lognormal(0.0, 0.06, iterations), worst_t).round(3)
    return TraceJob(spec, arrival_s, rollout, train)


def read(path: Path) -> list[TraceJob]:
    """Read a trace file, by arrival. Raises ``ValueError`` with the line of an error."""
    jobs = sorted(_lines(path), key=lambda job: job.arrival_s)
    if not jobs:
        raise ValueError(f"{path}: no jobs, expected one JSON object a line")
    if len({job.spec.id for job in jobs}) < len(jobs):
        raise ValueError(f"{path}: two jobs have the same id")
    return jobs


def _lines(path: Path) -> Iterator[TraceJob]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}, line {number}: {what}") from error


def from_json(data: dict[str, Any]) -> TraceJob:
    """The inverse of ``TraceJob.to_json``."""
    rest = {k: v for k, v in data.items() if k not in ("arrival_s", "rollout_s", "train_s")}
    rollout = np.array(data["rollout_s"], dtype=np.float64)
    train = np.array(data["train_s"], dtype=np.float64)
    spec = JobSpec.from_json(rest | {"iterations": len(rollout)})
    if len(rollout) != len(train) or not len(rollout):
        raise ValueError(f"job {spec.id}: rollout_s and train_s must be equally long, not empty")
    if min(rollout.min(), train.min()) <= 0 or not np.isfinite(rollout + train).all():
        raise ValueError(f"job {spec.id}: phases must take positive seconds")
    return TraceJob(spec, float(data["arrival_s"]), rollout, train)
