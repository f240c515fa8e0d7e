"""What ours gains over the paper's system, and at what bias: simulated, all on the same lengths.

    python experiments/improvements/run.py [--traces FOLDER] [--steps 40] [--write]

Three settings of the paper with its three kinds of rewards, and with ``--traces`` a folder of
PolyTrace folders (math, code, search and video), whose rewards take no time. Speed-ups are of the
seconds that a response takes, over plain rounds that grade while they decode. ``--write``
puts them into ``docs/speedups.yaml``, of which ``docs/gen.py`` makes the tables.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rollpacker.config import parse_as
from rollpacker.polytrace import formats
from rollpacker.sim.costs import calibration
from rollpacker.sim.estimate import on_paper_gpus, simulation_of
from rollpacker.sim.workload.source import LengthSource, of_model, of_trace
from rollpacker.sim.world.machines import SimulationConfig
from rollpacker.sim.world.simulator import Simulation

SETTINGS = (
    ("7B/8k", "paper-7b-8k", "paper-8k"),
    ("14B/16k", "paper-14b-16k", "paper-16k"),
    ("32B/32k", "paper-32b-32k", "paper-32k"),
)
REWARDS = {name: {"reward": name} for name in ("math", "code", "judge")}
SPEEDUPS = Path(__file__).parents[2] / "docs" / "speedups.yaml"
PAPER = {"planner": "paper", "streaming": {"scaling": "paper"}}
ARMS: dict[str, dict[str, Any]] = {
    "off": {"tail_batching": {"mode": "off"}},
    "off, graded after the rollout": {"tail_batching": {"mode": "off"}},
    "the paper's full system": {"tail_batching": {"mode": "race"}, **PAPER},
    "exact": {"tail_batching": {"mode": "exact"}},
    "race": {"tail_batching": {"mode": "race"}},
    "auto, bias limit 0.95": {"tail_batching": {"mode": "auto", "bias_limit": 0.95}},
    "auto, bias limit 0.9": {"tail_batching": {"mode": "auto", "bias_limit": 0.9}},
    "prompts, eta 1.125": {"tail_batching": {"mode": "prompts", "eta_prompts": 1.125}},
    "race, long rounds of two": {"tail_batching": {"mode": "race", "long_round_steps": 2}},
    "prompts, eta 1.125, long rounds of two": {
        "tail_batching": {"mode": "prompts", "eta_prompts": 1.125, "long_round_steps": 2}
    },
    "partial, eta 1.25": {"tail_batching": {"mode": "partial", "eta_prompts": 1.25}},
}


@dataclass(frozen=True)
class Outcome:
    """Seconds a response, kept over true mean length, and the share of stale tokens."""

    seconds: float
    kept: float
    stale: float = 0.0

    def over(self, base: Outcome) -> dict[str, float]:
        """A row, with ``base`` as 1."""
        told = {"stale": self.stale} if self.stale else {"kept": self.kept}
        told = {name: round(value, 2) for name, value in told.items()}
        return {"factor": round(base.seconds / self.seconds, 3)} | told


def simulate(
    job: tuple[SimulationConfig, Any, LengthSource, str, int],
) -> Outcome | None:
    """None where the mode cannot run the job."""
    config, costs, source, name, steps = job
    arm = ARMS[name]
    if arm["tail_batching"]["mode"] == "partial" and source.turns is not None:
        return None
    rollout = config.rollout.model_dump()
    tree = config.model_dump() | {
        "steps": steps,
        "asynchronous_grading": name != "off, graded after the rollout",
        "rollout": rollout | arm | {"streaming": arm.get("streaming", {})},
    }
    result = Simulation(parse_as(SimulationConfig, tree), costs, source).run()
    if arm["tail_batching"]["mode"] == "partial":
        # At first its queue fills up with prompts that are long.
        result = replace(result, steps=result.steps[steps // 3 :])
    return Outcome(1.0 / result.samples_per_s, result.kept_vs_true_len, result.stale_share)


def jobs(traces: Path | None) -> dict[str, tuple[SimulationConfig, Any, LengthSource]]:
    found: dict[str, tuple[SimulationConfig, Any, LengthSource]] = {}
    for name, costs, model in SETTINGS:
        tree = {"calibration": costs, "workload": model, "domains": REWARDS}
        tree["rollout"] = {"prompts_per_step": 128, "num_generations": 8}
        config = parse_as(SimulationConfig, tree)
        found[name] = config, calibration.load(costs), of_model(model)
    for folder in sorted(traces.iterdir()) if traces else []:
        if folder.is_dir():
            job = on_paper_gpus(folder.name, of_trace(formats.read(folder)))
            case = job.cases[0]
            found[folder.name] = simulation_of(job, case, 1), case.calibration, job.source
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = jobs(given.traces)
    work = [(*job, arm, given.steps) for job in found.values() for arm in ARMS]
    with ProcessPoolExecutor() as pool:
        done = dict(
            zip(((n, a) for n in found for a in ARMS), pool.map(simulate, work), strict=True)
        )
    rows = {
        name: {arm: out.over(base) for arm in ARMS if base and (out := done[name, arm])}
        for name in found
        for base in [done[name, "off"]]
    }
    print(yaml.safe_dump(rows, sort_keys=False, default_flow_style=None))
    if given.write:
        told = yaml.safe_load(SPEEDUPS.read_text(encoding="utf-8"))
        told["simulated"] |= rows
        SPEEDUPS.write_text(
            yaml.safe_dump(told, sort_keys=False, default_flow_style=None), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
