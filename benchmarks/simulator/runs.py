"""Real runs of the demo's job, replayed in the simulator: how near each phase of each step comes.

    python -m benchmarks.simulator.runs --steps 60 --out runs/simulated
    python -m benchmarks.simulator.runs --steps 40 --prompts 64 --out runs/simulated-large
    python -m benchmarks.simulator.runs --steps 16 --prompts 256 --out runs/simulated-256

Every mode runs with two seeds, and with the first of them once more. Costs are fitted to one run
and tested on steps that were held back, on the other seed and on the other mode. What one run tells
of the next one with the same seed stands beside it: how noisy the machine is, counted twice. Runs
that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks._run import flags, made, table
from rollpacker.config import RunConfig
from rollpacker.demo.contention import Contention
from rollpacker.demo.run import Size, demo_config
from rollpacker.demo.warm_start import default_cache, warm_start
from rollpacker.job import train
from rollpacker.polytrace.compare import STEP, TimedSteps, compare
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.recorded.fit_costs import calibrate, timed
from rollpacker.sim.recorded.rerun import replayed
from rollpacker.sim.recorded.run_record import METRICS, RunRecord, read_run

MODES = ("off", "exact")
RUNS = (("seed1", 1), ("seed1-again", 1), ("seed2", 2))
Pair = tuple[TimedSteps, TimedSteps]
"""Predicted and measured."""


def config_of(
    model: Path, folder: Path, mode: str, seed: int, arguments: argparse.Namespace
) -> RunConfig:
    """The short job of docs/benchmarks.md with so many prompts a step; no prompt twice."""
    size = Size(steps=arguments.steps, held_out=50, prompts=arguments.prompts)
    return demo_config(model, folder, mode, size, {"seed": seed})


def run_all(arguments: argparse.Namespace) -> dict[tuple[str, str], RunRecord]:
    """By name and mode."""
    out: Path = arguments.out
    model = warm_start(default_cache())
    found: dict[tuple[str, str], RunRecord] = {}
    for name, seed in RUNS:
        for mode in MODES:
            folder = out / name / mode
            if not made(folder):
                others = Contention()
                config = config_of(model, folder, mode, seed, arguments)
                train(config, progress=Progress(every=arguments.steps))
                print(f"{name} {mode}: other processes took {others.share():.0%} of the cores")
            found[name, mode] = read_run(folder)
    return found


def pairs(runs: dict[tuple[str, str], RunRecord]) -> Iterator[tuple[str, str, Pair]]:
    """What is predicted, from what, and both tables."""
    for mode, other in (MODES, MODES[::-1]):
        run, again, second = (runs[name, mode] for name, _ in RUNS)
        even, odd = ([s for s in timed(run) if s.number % 2 == n] for n in (0, 1))
        yield mode, "its even steps, for the odd ones", replayed(run, calibrate(run, even), odd)
        yield mode, "another seed", replayed(second, calibrate(run))
        yield mode, f"mode {other}, another seed", replayed(second, calibrate(runs["seed1", other]))
        yield mode, "the same seed's run, step by step", (measured(again), measured(run))


def measured(run: RunRecord) -> TimedSteps:
    """What a run's own metrics say."""
    steps = timed(run)
    phases = {phase: tuple(step.measured[phase] for step in steps) for phase in METRICS}
    return TimedSteps(source=run.name, steps=tuple(step.number for step in steps), phases=phases)


def windows(table: TimedSteps, size: int) -> TimedSteps:
    """Means of so many steps each; those that are left over are left out."""
    count = len(table.steps) // size
    phases = {
        phase: tuple(np.reshape(values[: count * size], (count, size)).mean(axis=1).tolist())
        for phase, values in table.phases.items()
    }
    return TimedSteps(source=table.source, steps=tuple(range(count)), phases=phases)


def row(predicted: TimedSteps, actual: TimedSteps, size: int) -> str:
    """Accuracy of the step and of its phases, in means of ``size`` steps."""
    found = compare(windows(predicted, size), windows(actual, size))
    each = {STEP: found.accuracy_mean} | {name: a.mean for name, a in found.phases.items()}
    return " / ".join(f"{each[phase]:.1%}" for phase in METRICS)


def main() -> None:
    parser = flags(
        __doc__,
        steps=60,
        prompts=(16, "a step"),
        out=Path("runs/simulated"),
    )
    runs = run_all(parser.parse_args())
    print("accuracy of step / rollout / training\n")
    table(
        ("predicted", "from", "each step", "means of 5", "whole run"),
        (
            (f"`{mode}`", source, *(row(told, was, size) for size in (1, 5, len(was.steps))))
            for mode, source, (told, was) in pairs(runs)
        ),
    )


if __name__ == "__main__":
    main()
