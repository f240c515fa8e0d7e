"""The paper's cluster-wide results beside ours, on the synthetic trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly, philly
from rollpacker.rollmux.simulation.policies import POLICIES, Run
from rollpacker.rollmux.simulation.result import SimulationResult
from rollpacker.sim.reproduce import ResultRow, row

SETTING = Philly(cycles="one")
"""The published one as far as known: 200 jobs, two weeks, iterations of one class."""
NEEDED = ("solo", "colocated", "rollmux-plain", "rollmux")
_TRACE = "synthetic trace, other than the paper's"

Results = Mapping[str, Sequence[SimulationResult]]


def rollmux_rows(seeds: int, setting: Philly = SETTING) -> list[ResultRow]:
    """Simulate and compare; the mean over seeds."""
    results: dict[str, list[SimulationResult]] = {name: [] for name in NEEDED}
    for seed in range(seeds):
        jobs = philly(setting, np.random.default_rng(seed))
        for name in NEEDED:
            results[name].append(POLICIES[name](Run(jobs, seed, EventLog(None), None)))
    return rows(results)


def rows(results: Results) -> list[ResultRow]:
    """From the simulations of each policy, one per seed."""

    def mean(value: Callable[[str, int], float], name: str) -> float:
        return float(np.mean([value(name, seed) for seed in range(len(results[name]))]))

    def gain(over: str) -> Callable[[str, int], float]:
        return lambda name, seed: results[over][seed].cost / results[name][seed].cost

    def kept(name: str, seed: int) -> float:
        return float(results[name][seed].to_json()["slo_attained"])

    def saved(pool: str) -> Callable[[str, int], float]:
        def points(name: str, seed: int) -> float:
            bubbles = [results[n][seed].to_json()["bubble"][pool] for n in ("solo", name)]
            return 100.0 * (bubbles[0] - bubbles[1])

        return points

    made: list[ResultRow] = []
    for name in ("rollmux-plain", "rollmux"):
        for what, paper, value in (
            ("cost against solo", 1.84, gain("solo")),
            ("cost against co-located", 1.38, gain("colocated")),
            ("SLO kept", 1.0, kept),
            ("rollout bubble, points less", 24.4, saved("rollout")),
            ("training bubble, points less", 43.1, saved("train")),
        ):
            made.append(row(f"rollmux/{name}/{what}", paper, mean(value, name), note=_TRACE))
    return made
