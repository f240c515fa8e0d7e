"""What `exact` gains by decoding ahead on simulated GPUs, by tokens of a verification.

    python -m benchmarks.simulator.speculation --steps 40

The paper's three settings. Speed-ups over plain rounds of the same lengths, per response
and per trained token (racing trains on shorter responses); costs of drafts are stated in each row.
The last column is the least number of tokens at which the published speed-up is reached.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks._run import flags, table
from rollpacker.config import parse_as
from rollpacker.sim.costs import calibration
from rollpacker.sim.workload.source import of_model
from rollpacker.sim.world.config import SimulationConfig
from rollpacker.sim.world.simulator import Simulation

SETTINGS = {
    "7B/8k": ("paper-7b-8k", "paper-8k", 2.03),
    "14B/16k": ("paper-14b-16k", "paper-16k", 2.22),
    "32B/32k": ("paper-32b-32k", "paper-32k", 2.56),
}
"""Calibration, lengths, and the paper's speed-up."""
TOKENS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
COSTS = {
    "nothing": {"step_s": 0.0, "row_s": 0.0},
    "0.5 ms and 15 us a row": {"step_s": 0.5e-3, "row_s": 15e-6},
    "2 ms and 30 us a row": {"step_s": 2e-3, "row_s": 30e-6},
}
Arm = tuple[str, str, dict[str, Any]]
"""Setting, mode, and `ahead`."""


def simulate(job: tuple[Arm, int]) -> tuple[float, float]:
    """Seconds of a response, and kept over true length."""
    (setting, mode, ahead), steps = job
    costs, lengths, _ = SETTINGS[setting]
    rollout: dict[str, Any] = {
        "prompts_per_step": 128,
        "num_generations": 8,
        "tail_batching": {"mode": mode},
    }
    if mode == "race":
        rollout |= {"planner": "paper", "streaming": {"scaling": "paper"}}
    tree = {
        "calibration": costs,
        "workload": lengths,
        "steps": steps,
        "rollout": rollout,
        "domains": {name: {"reward": name} for name in ("math", "code", "judge")},
        "ahead": ahead,
    }
    config = parse_as(SimulationConfig, tree)
    result = Simulation(config, calibration.load(costs), of_model(lengths)).run()
    return 1.0 / result.samples_per_s, result.kept_vs_true_len


def main() -> None:
    arguments = flags(__doc__, steps=40).parse_args()
    arms: list[Arm] = []
    for setting in SETTINGS:
        arms += [(setting, "off", {}), (setting, "race", {})]
        arms += [(setting, "exact", {"tokens": t} | c) for c in COSTS.values() for t in TOKENS]
    with ProcessPoolExecutor() as pool:
        found = dict(
            zip(
                map(repr, arms),
                pool.map(simulate, [(arm, arguments.steps) for arm in arms]),
                strict=True,
            )
        )
    for setting, (_, _, published) in SETTINGS.items():
        off = found[repr((setting, "off", {}))][0]
        seconds, kept = found[repr((setting, "race", {}))]
        print(f"\n{setting}: the paper's system here {off / seconds:.2f}x a response, ", end="")
        print(f"{off / seconds * kept:.2f}x a trained token; published {published:.2f}x\n")
        head = ("drafts cost", *(f"{t:g}" for t in TOKENS), "published at")
        table(head, (_row(name, setting, off, found) for name in COSTS))


def _row(name: str, setting: str, off: float, found: dict[str, tuple[float, float]]) -> list[str]:
    arms = (repr((setting, "exact", {"tokens": t} | COSTS[name])) for t in TOKENS)
    gains = [off / found[arm][0] for arm in arms]
    # Gains rise with tokens; between two of them they are nearly straight.
    published = SETTINGS[setting][2]
    enough = max(gains) >= published
    least = f"{np.interp(published, gains, TOKENS):.2f}" if enough else "more"
    return [name, *(f"{gain:.2f}x" for gain in gains), least]


if __name__ == "__main__":
    main()
