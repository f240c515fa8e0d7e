"""Policies for a shared cluster, simulated on one trace, and the published results beside ours.

    python experiments/rollmux/run.py --policies solo colocated rollmux rollmux-plain --seed 0
    python experiments/rollmux/run.py --inventory nodes.yaml --policies fifo backfill all-training
    python experiments/rollmux/run.py --reproduce 3

README.md says what the policies are.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from baselines import colocated, gavel, simulate_alone, solo, waiting
from published import Published, Rule, at_random, most_idle

from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly, TraceJob, philly, read
from rollpacker.rollmux.scheduler import inventory_file
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation, simulate
from rollpacker.rollmux.simulation.result import SimulationResult
from rollpacker.sim.reproduce import ResultRow, row

Jobs = Sequence[TraceJob]
Policy = Callable[[Jobs, int, EventLog], SimulationResult]
"""Of a trace, a seed for those that draw, and a log."""


def published(jobs: Jobs, log: EventLog, rule: Rule | None = None) -> SimulationResult:
    return ClusterSimulation(jobs, Published(rule), log).run()


RENTED: dict[str, Policy] = {
    "solo": lambda jobs, _, log: simulate_alone(jobs, solo, log),
    "colocated": lambda jobs, _, log: simulate_alone(jobs, colocated, log),
    "gavel": lambda jobs, _, log: simulate_alone(jobs, gavel, log),
    "random": lambda jobs, seed, log: published(jobs, log, at_random(np.random.default_rng(seed))),
    "greedy": lambda jobs, _, log: published(jobs, log, most_idle),
    "rollmux": lambda jobs, _, log: simulate(jobs, "rollmux", log),
    "rollmux-plain": lambda jobs, _, log: published(jobs, log),
}
SETTING = Philly(cycles="one")
"""The published one as far as known: 200 jobs, two weeks, iterations of one class."""
NEEDED = ("solo", "colocated", "rollmux-plain", "rollmux")


def reproduced(seeds: int, setting: Philly = SETTING) -> list[ResultRow]:
    """The published results beside ours; the mean over seeds."""
    results: dict[str, list[SimulationResult]] = {name: [] for name in NEEDED}
    for seed in range(seeds):
        jobs = philly(setting, np.random.default_rng(seed))
        for name in NEEDED:
            results[name].append(RENTED[name](jobs, seed, EventLog(None)))
    return rows(results)


def rows(results: Mapping[str, Sequence[SimulationResult]]) -> list[ResultRow]:
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
            note = "synthetic trace, other than the paper's"
            made.append(row(f"rollmux/{name}/{what}", paper, mean(value, name), note=note))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=["solo", "rollmux-plain", "rollmux"])
    parser.add_argument("--trace", type=Path, help="a trace file; else a synthetic trace")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", choices=["1", "mixed"], default="1")
    parser.add_argument("--cycles", choices=["mixed", "one"], default="mixed")
    parser.add_argument("--inventory", type=Path, help="named nodes (YAML)")
    parser.add_argument("--events", type=Path, help="folder for a log of each policy")
    parser.add_argument("--reproduce", type=int, metavar="SEEDS", help="the published results")
    args = parser.parse_args()
    if args.reproduce:
        for each in reproduced(args.reproduce):
            print(json.dumps(asdict(each)))
        return
    shape = Philly(jobs=args.jobs, days=args.days, nodes=args.nodes, cycles=args.cycles)
    rng = np.random.default_rng(args.seed)
    jobs = read(args.trace) if args.trace else philly(shape, rng)
    policies: Mapping[str, Policy] = RENTED
    if args.inventory:
        nodes = inventory_file.read(args.inventory)
        policies = {
            "rollmux": lambda jobs, _, log: simulate(jobs, "rollmux", log, nodes=nodes),
            **waiting(nodes),
        }
    if unknown := set(args.policies) - policies.keys():
        parser.error(f"unknown policies {', '.join(unknown)}; known: {', '.join(policies)}")
    for name in args.policies:
        file = io.StringIO() if args.events else None
        result = policies[name](jobs, args.seed, EventLog(file))
        if file is not None:
            args.events.mkdir(parents=True, exist_ok=True)
            (args.events / f"{name}.jsonl").write_text(file.getvalue(), encoding="utf-8")
        print(json.dumps({"policy": name} | result.to_json()), flush=True)


if __name__ == "__main__":
    main()
