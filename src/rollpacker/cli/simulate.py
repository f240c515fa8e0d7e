"""``rollpacker simulate``, ``estimate`` and ``calibrate``: jobs on simulated machines."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rollpacker.cli.output import Json, console, print_json, print_note, print_plain

if TYPE_CHECKING:
    from rollpacker.sim.result import JobResult


def simulate(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE ...]", help="Overrides.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", help="Journal of every decision to write.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a job's policies on simulated machines; nothing is decoded or trained.

    Example: rollpacker simulate examples/simulate/paper-14b-16k.yaml steps=20
    rollout.tail_batching.mode=race
    """
    from rollpacker import config
    from rollpacker.sim.config import SimulationConfig

    loaded = config.load_as(SimulationConfig, path, overrides or [])
    began = time.perf_counter()
    result = _run(loaded, journal)
    result = replace(result, sim_wall_s=time.perf_counter() - began)
    if as_json:
        print_json(_as_json(result))
        return
    console.print(_steps_table(result))
    for line in _summary(result):
        print_plain(line)


def _run(config: Any, journal: Path | None) -> JobResult:
    from rollpacker.core.journal import JournalWriter
    from rollpacker.sim import calibration
    from rollpacker.sim.simulator import Simulation
    from rollpacker.sim.source import load_source

    costs = calibration.load(config.calibration)
    source = load_source(config.workload, config.task, note=print_note)
    if journal is None:
        return Simulation(config, costs, source).run()
    journal.unlink(missing_ok=True)
    writer = JournalWriter(journal)
    simulation = Simulation(config, costs, source, record=writer.record)
    writer.meta(
        {"settings": simulation.settings.to_json(), "state": simulation.policy.state_dict()}
    )
    result = simulation.run()
    writer.close()
    return result


def _as_json(result: JobResult) -> dict[str, Any]:
    return {
        "step_s": [step.step_s for step in result.steps],
        "rollout_s": [step.rollout_s for step in result.steps],
        "train_s": [step.train_s for step in result.steps],
        "round_kind": [str(step.kind.value) for step in result.steps],
        "mean_step_s": result.mean_step_s,
        "samples_per_s": result.samples_per_s,
        "kept_vs_true_len": result.kept_vs_true_len,
        "bubble": result.bubble,
        "preemptions": sum(step.preemptions for step in result.steps),
        "bounds": {
            "packing_s": result.packing_s,
            "single_sequence_s": result.single_sequence_s,
        },
        "sim_wall_s": result.sim_wall_s,
    }


def _steps_table(result: JobResult) -> Table:
    view = Table()
    for name in ("rounds", "steps", "step s", "rollout s", "train s", "samples", "decoded tokens"):
        view.add_column(name, justify="left" if name == "rounds" else "right")
    for kind in sorted({step.kind for step in result.steps}):
        steps = result.of(kind)
        means = (
            sum(values) / len(steps)
            for values in zip(
                *((s.step_s, s.rollout_s, s.train_s, s.samples, s.decoded_tokens) for s in steps),
                strict=True,
            )
        )
        cells = [f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in means]
        view.add_row(kind.value, str(len(steps)), *cells)
    return view


def _summary(result: JobResult) -> list[str]:
    return [
        f"{result.mean_step_s:.4g} s a step, {result.samples_per_s:.4g} responses a second, "
        f"workers idle for {result.bubble:.0%} of the time",
        f"kept responses are {result.kept_vs_true_len:.2f} of the true mean length",
        f"bounds: no rollout is shorter than {result.single_sequence_s:.4g} s where a response "
        f"reaches the longest length, nor than {result.packing_s:.4g} s with full engines",
        f"simulated in {result.sim_wall_s:.1f} s",
    ]
