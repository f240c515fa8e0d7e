"""An emulated run's job in the simulator: its policy, lengths and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rollpacker import config as configuration
from rollpacker.core import journal
from rollpacker.emulate.config import Emulated
from rollpacker.policy.engines.device_split import replica_size, split
from rollpacker.policy.engines.fleet import Fleet, colocated, grid, separate
from rollpacker.policy.rollout import from_journal
from rollpacker.sim.estimate import CostCase, EstimatedJob
from rollpacker.sim.workload.source import LengthSource
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.step import StepResult
from rollpacker.sim.world.world import World


def simulate(run: Path) -> list[StepResult]:
    """Simulate the steps of an emulated run. Raises ``ValueError`` for unreadable files."""
    config = configuration.parse(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    metas = (line["meta"] for _, line in journal.read_all(run / "journal.jsonl") if "meta" in line)
    meta = next(metas)
    emulated, policy = Emulated(config), from_journal(meta)
    settings = policy.settings
    costs = WorldCosts.of(
        emulated.calibration,
        fleet=_fleet(config),
        kinds={domain: emulated.kind(domain) for domain in settings.sizes},
        reward_phase=not settings.asynchronous_grading,
    )
    running = getattr(config.engine, "max_running", costs.max_running)
    world = World(
        policy,
        emulated.workload(settings.sizes),
        replace(costs, max_running=running, ahead=emulated.ahead),
        measure=config.rollout.planner != "off",
    )
    return [world.run_step(step) for step in range(config.steps)]


def estimated(run: Path, source: LengthSource, task: str) -> EstimatedJob | None:
    """An emulated run's job on its own machine, None for another run. Raises ``ValueError``."""
    try:
        tree: Any = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        file = tree["devices"]["emulate"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    if file is None:
        return None
    config = configuration.parse(tree)
    emulated = Emulated(config)
    changed = {"ahead": emulated.ahead, "rollout_tp": config.engine.tensor_parallel}
    costs = emulated.calibration.model_copy(update=changed)
    gpus = config.devices.nodes * config.devices.per_node
    return EstimatedJob(
        task=task,
        source=source,
        rollout=config.rollout,
        cases=(CostCase(calibration=costs, gpus=gpus),),
        graded=True,
        costs={costs.name: f"{costs.model} on {gpus} {costs.device}, as the run emulated them"},
        left_out="the time of the driver",
        texts=False,
        early=config.grading.asynchronous if config.rollout.tail_batching.mode == "off" else None,
    )


def _fleet(config: configuration.RunConfig) -> Fleet:
    devices = grid(config.devices.nodes * config.devices.per_node, config.devices.per_node)
    decoding, training = split(config, devices)
    size, replica = config.engine.tensor_parallel, replica_size(config, len(training))
    if config.devices.layout == "colocated":
        return colocated(devices, tensor_parallel=size, replica=replica)
    return separate(decoding, training, tensor_parallel=size, replica=replica)
