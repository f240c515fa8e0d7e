"""The real runtime at the size of a cluster, on emulated devices, beside the simulator.

    python -m benchmarks.driver.emulated
    python -m benchmarks.driver.emulated --nodes 4
    python -m benchmarks.driver.emulated --gpus 512 --modes exact --factor 20
    python -m benchmarks.driver.emulated --graders 16 --trace TRACE

Each mode runs `rollpacker train` with `devices.emulate`, in a process of its own: driver, policy,
channels, grading processes, journal and samples are real, the devices take the calibrated time of
GPUs divided by the factor, in processes of this machine or (`--nodes`) of the nodes of a Ray
cluster, all of them on this machine: agents start them there, and sockets lead to them. The same
policy settings, lengths and machine then go through the simulator. All seconds are emulated;
lateness is of the machine's clock. Where the driver's CPU time, times the factor, is
more than 60% of the rollouts' time, the driver is slower than it would be beside real devices, and
the row says so. The rewards and the model are made up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks._run import apart, flags, lines, metrics, summary, table
from rollpacker import config
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.paper_job import Paper, paper_job
from rollpacker.emulate.twin import simulate
from rollpacker.job import train

PHASES = ("rollout", "of it grading's end", "training", "sync", "step")
GPUS = 64
"""Of the paper's 32B setting, which has 128 prompts of 8 responses a step."""


def job_of(args: argparse.Namespace, mode: str, folder: Path) -> config.RunConfig:
    """The paper's setting on so many GPUs, in one mode."""
    paper = Paper(
        calibration="paper-32b-32k",
        workload=str(args.trace or "paper-32k"),
        gpus=args.gpus,
        factor=args.factor,
        steps=args.steps,
    )
    nodes = args.nodes or 1
    changes: dict[str, Any] = {
        "rollout": {"planner": "off"},
        "devices": {"nodes": nodes, "per_node": args.gpus // nodes},
        "cluster": {"address": args.address},
    }
    if args.graders:
        changes["grading"] = {"workers": args.graders}
    return paper_job(paper, mode, folder, changes)


def run_mode(args: argparse.Namespace, mode: str, folder: Path) -> dict[str, Any]:
    """One mode, emulated and simulated."""
    job = job_of(args, mode, folder)
    run = train(job)
    found = summary(run)
    emulated, simulated = measured(run), predicted(job, run)
    return {
        "mode": mode,
        "emulated": {phase: statistics.mean(values) for phase, values in emulated.items()},
        "simulated": {phase: statistics.mean(values) for phase, values in simulated.items()},
        "kept": found["kept_tokens"],
        "kept_simulated": sum(step.kept_tokens for step in simulate(run)),
        "driver_cpu_s": found["timing_s"]["driver_cpu"] / found["steps"],
        **found["emulated"],
    }


def measured(run: Path) -> dict[str, list[float]]:
    """Emulated seconds of each step's phases."""
    applied: dict[int, float] = {}
    for task in lines(run / "workers.jsonl"):
        if task["kind"] == "apply":
            applied[task["step"]] = max(applied.get(task["step"], 0.0), task["end_s"])
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for step in metrics(run):
        rollout = step["timing_s/rollout"]
        sync = step["start_s"] + step["step_time"] - applied[step["step"]]
        phases["rollout"].append(rollout)
        phases["of it grading's end"].append(step["timing_s/grade_wait"])
        phases["training"].append(step["step_time"] - rollout - sync)
        phases["sync"].append(sync)
        phases["step"].append(step["step_time"])
    return phases


def predicted(job: config.RunConfig, run: Path) -> dict[str, list[float]]:
    """The simulator's, where a phase of rewards ends the rollout as in a run."""
    emulated = Emulated(job)
    rewards = 0.0 if emulated.asynchronous else emulated.calibration.synchronous_reward_s
    steps = simulate(run)
    return {
        "rollout": [step.rollout_s + rewards for step in steps],
        "of it grading's end": [step.grade_wait_s + rewards for step in steps],
        "training": [step.train_s - rewards for step in steps],
        "sync": [emulated.publish_s for _ in steps],
        "step": [step.step_s for step in steps],
    }


def show(rows: list[dict[str, Any]]) -> None:
    print("\nseconds a step, emulated / simulated\n")
    off = next((row for row in rows if row["mode"] == "off"), None)
    table(["mode", *PHASES, "kept tokens", "off / mode"], [beside_all(row, off) for row in rows])
    columns = ("mode", "a step takes longer by, ms of the clock", "late p50 / p99 / max, ms")
    columns += ("driver CPU s a step", "driver utilisation")
    print()
    table(columns, map(clock, rows))


def beside_all(row: Mapping[str, Any], off: Mapping[str, Any] | None) -> list[str]:
    kept = f"{row['kept']:,}"
    if row["kept"] != row["kept_simulated"]:
        kept += f" / {row['kept_simulated']:,}"
    cells = [beside(row["emulated"][phase], row["simulated"][phase]) for phase in PHASES]
    return [row["mode"], *cells, kept, "" if off is None else faster(off, row)]


def clock(row: Mapping[str, Any]) -> list[str]:
    more = 1e3 * (row["emulated"]["step"] - row["simulated"]["step"]) / row["factor"]
    late = " / ".join(f"{row['lateness_ms'][key]:.1f}" for key in ("p50", "p99", "max"))
    use = f"{row['driver_utilisation']:.2f}" + ("" if row["honest"] else ", not honest")
    return [row["mode"], f"{more:.0f}", late, f"{row['driver_cpu_s']:.2f}", use]


def beside(emulated: float, simulated: float) -> str:
    return f"{emulated:.1f} / {simulated:.1f} ({emulated / simulated - 1:+.1%})"


def faster(off: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    ratios = [off[kind]["step"] / row[kind]["step"] for kind in ("emulated", "simulated")]
    return " / ".join(f"{ratio:.2f}x" for ratio in ratios)


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """The address of a Ray cluster of so many nodes while it is needed; empty for none."""
    if not count:
        yield ""
        return
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    least = {"object_store_memory": 80_000_000}
    head = least | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1, **least)
        yield cluster.address
    finally:
        cluster.shutdown()


def main() -> None:
    args = flags(
        __doc__,
        gpus=GPUS,
        nodes=(0, "of a Ray cluster; default: no Ray"),
        address=("", "of that, which a mode's process is told"),
        factor=50.0,
        steps=2,
        modes=["off", "exact", "race", "auto"],
        graders=(0, "default: one for 8 GPUs, at most 32"),
        trace=(Path, "lengths of a trace; default: the paper's"),
        json=(False, "one mode in this process; its numbers are the last line"),
    ).parse_args()
    if args.json:
        with tempfile.TemporaryDirectory(prefix="emulated-") as name:
            print(json.dumps(run_mode(args, args.modes[0], Path(name))))
        return
    with ray_nodes(args.nodes) as address:
        same = (*sys.argv[1:], "--address", address, "--json", "--modes")
        show([apart("benchmarks.driver.emulated", *same, mode) for mode in args.modes])


if __name__ == "__main__":
    main()
