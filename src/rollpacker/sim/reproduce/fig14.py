"""Figure 14: 14B on 32, 64 and 128 GPUs, samples per second over veRL's on 32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollpacker.sim.costs import calibration
from rollpacker.sim.reproduce.jobs import PaperJob
from rollpacker.sim.reproduce.rows import ResultRow, row
from rollpacker.sim.reproduce.table2 import part, verl
from rollpacker.sim.world.result import JobResult, mean

TITLE = "Samples per second with the number of GPUs, 14B"
GPUS = (32, 64, 128)
PAPER = {"veRL": (1.00, 1.42, 2.18), "RollPacker": (2.22, 3.37, 4.81)}
RULES = {"same batch": 0.0, "batch by root of GPUs": 0.5, "batch by GPUs": 1.0}
"""How the batch grows: the power of the number of GPUs."""
_NOTE = (
    "assumes how the batch grows, which the paper does not say; the judge's slots grow with the "
    "GPUs"
)


def scaled(base: PaperJob, gpus: int, power: float) -> PaperJob:
    """A job on more GPUs with more prompts a step."""
    prompts = round(128 * (gpus / GPUS[0]) ** power)
    rollout = base.config["rollout"] | {"prompts_per_step": prompts}
    rewards = calibration.load(base.config["calibration"]).rewards.model_dump()
    slots = rewards["judge_slots"] * gpus // GPUS[0]
    return replace(
        base,
        config=base.config | {"gpus": gpus, "steps": 10, "rollout": rollout},
        costs=base.costs | {"rewards": rewards | {"judge_slots": slots}},
    )


def jobs() -> dict[str, PaperJob]:
    """Both systems, three sizes, three rules."""
    systems = {"veRL": verl("16k"), "RollPacker": part("16k", "trainer")}
    return {
        f"{rule}/{name}/{gpus}": scaled(base, gpus, power)
        for rule, power in RULES.items()
        for name, base in systems.items()
        for gpus in GPUS
    }


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Each rule on its own: the paper does not say how its batch grew."""
    speed = {name: mean(r.samples_per_s for r in many) for name, many in results.items()}
    found: list[ResultRow] = []
    for rule in RULES:
        base = speed[f"{rule}/veRL/32"]
        for name, values in PAPER.items():
            for gpus, paper in zip(GPUS, values, strict=True):
                ours = speed[f"{rule}/{name}/{gpus}"] / base
                label = f"fig14/{rule}/{name} on {gpus}"
                # On 32 GPUs: the unit of the figure, and a cell of Table 2.
                found.append(row(label, paper, ours, fitted=gpus == GPUS[0], note=_NOTE))
    return found
