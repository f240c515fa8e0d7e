"""Simulated jobs of the paper's experiments, as plain data that another process can run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollpacker.config import parse_as
from rollpacker.core.pump import Record
from rollpacker.sim.costs import calibration
from rollpacker.sim.workload.source import LengthSource, of_model
from rollpacker.sim.world.config import SimulationConfig
from rollpacker.sim.world.result import JobResult
from rollpacker.sim.world.simulator import Simulation

SETTINGS = {
    "8k": ("paper-7b-8k", "paper-8k", "7B/8k"),
    "16k": ("paper-14b-16k", "paper-16k", "14B/16k"),
    "32k": ("paper-32b-32k", "paper-32k", "32B/32k"),
}
"""Calibration, length model and title of the paper's settings."""

Tree = dict[str, Any]

CYCLE = 5
"""Rounds from one long round to the next at 1.25 prompts started per prompt kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperJob:
    """One job of an experiment.

    Args:
        config: keys of ``SimulationConfig``.
        costs: keys of the calibration that this experiment changes.
    """

    config: Tree
    costs: Tree = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        """The same for the same job."""
        return json.dumps([type(self).__name__, asdict(self)], sort_keys=True)

    def seeded(self, seed: int) -> PaperJob:
        """The same job with other lengths."""
        return replace(self, config={**self.config, "seed": seed})

    def run(self, record: Record | None = None) -> JobResult:
        """Simulate it; ``record`` takes every event with its decisions."""
        config = parse_as(SimulationConfig, self.config)
        known = calibration.load(config.calibration).model_dump(exclude_unset=True)
        costs = calibration.Calibration.model_validate(known | self.costs)
        return Simulation(config, costs, self.source(config), record).run()

    def source(self, config: SimulationConfig) -> LengthSource:
        """Its lengths."""
        return of_model(config.workload)


def job(
    setting: str,
    mode: str,
    *,
    etas: tuple[float, float] = (1.25, 1.25),
    steps: int = 4 * CYCLE,
    streaming: Tree | None = None,
    planner: str = "off",
    costs: Tree | None = None,
    **keys: Any,
) -> PaperJob:
    """A job in one of the paper's settings.

    Args:
        setting: ``8k``, ``16k`` or ``32k``.
        mode: of tail batching.
        etas: prompts and responses started per one kept.
        steps: of the job.
        streaming: keys of ``rollout.streaming``; default: none is streamed.
        planner: of tensor-parallel sizes.
        costs: keys of the calibration to change.
        keys: further keys of ``SimulationConfig``.
    """
    costs_name, lengths, _ = SETTINGS[setting]
    rollout = {
        "prompts_per_step": 128,
        "num_generations": 8,
        "planner": planner,
        "tail_batching": {
            "mode": mode,
            "eta_prompts": etas[0],
            "eta_responses": etas[1],
            "audit_every": 0,
        },
        "streaming": {"enabled": False} if streaming is None else streaming,
    }
    config = {"calibration": costs_name, "workload": lengths, "steps": steps, "rollout": rollout}
    return PaperJob(config=config | keys, costs=costs or {})


PAPER_STREAMING: Tree = {"group_tokens": 16384, "scaling": "paper"}
"""The stream trainer with the paper's rule."""


def three_domains() -> Tree:
    """The paper's mix: a third each of math, code and judged tasks."""
    return {name: {"reward": name} for name in ("math", "code", "judge")}
