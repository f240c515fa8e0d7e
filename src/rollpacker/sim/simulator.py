"""The simulated driver: the real policy of a job over cost models, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollpacker.core.pump import Record
from rollpacker.policy.machine import EngineProfile, Machine
from rollpacker.policy.rewards import TimeoutSettings
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings, asynchronous_grading, streaming_rules
from rollpacker.sim.calibration import Calibration
from rollpacker.sim.config import SimulationConfig
from rollpacker.sim.costs import EngineCosts, packing_bound_s, single_sequence_s
from rollpacker.sim.result import JobResult, StepResult
from rollpacker.sim.source import Source
from rollpacker.sim.workload import Workload
from rollpacker.sim.world import World, WorldCosts

_CURVE = tuple(2**power for power in range(11))
"""Batch sizes at which the policy is told a decode step's latency."""
_CONTEXT = 1024
"""Context of each sequence at which that latency is taken, tokens."""
_BOUND_SAMPLES = 4096


class Simulation:
    """One job on simulated machines.

    Args:
        config: the job.
        calibration: costs of its machines.
        source: lengths of its responses.
        record: takes every event with its decisions.

    Raises ``ValueError`` when the machines cannot run it.
    """

    def __init__(
        self,
        config: SimulationConfig,
        calibration: Calibration,
        source: Source,
        record: Record | None = None,
    ) -> None:
        self._config = config
        self._source = source
        self._calibration = calibration
        self.costs = world_costs(config, calibration)
        self.cap = config.rollout.max_completion_length or source.cap or calibration.response_cap
        self._workload = Workload(
            source.lengths,
            domains={name: domain.share for name, domain in config.domains.items()},
            prompt_tokens=source.prompt_tokens or calibration.prompt_tokens,
            seed=config.seed,
            recorded=source.recorded,
        )
        self.settings = self._settings()
        self.policy = RolloutPolicy(self.settings)
        self._world = World(
            self.policy,
            self._workload,
            self.costs,
            cap=self.cap,
            measure=self.settings.machine is not None,
            record=record,
        )

    def _settings(self) -> RolloutSettings:
        config, costs = self._config, self.costs
        machine = machine_of(config, self._calibration)
        latency = _latency(costs.engine(costs.worker_devices))
        return RolloutSettings(
            rollout=config.rollout,
            seed=config.seed,
            sizes=self._workload.sizes,
            cap=self.cap,
            latency=latency,
            asynchronous_grading=asynchronous_grading(config.rollout, config.asynchronous_grading),
            rules=streaming_rules(
                config.rollout,
                latency=latency,
                workers=costs.workers,
                whole_batch=config.reward_phase,
                ordered=not config.balanced_training,
                machine=machine,
            ),
            machine=machine,
        )

    def steps(self) -> Iterator[StepResult]:
        """Run the job, one step at a time."""
        for number in range(self._config.steps):
            yield self._world.run_step(number)

    def run(self) -> JobResult:
        """Run the whole job."""
        steps = list(self.steps())
        return JobResult(
            steps=steps,
            kept_vs_true_len=self._world.kept_vs_true_len,
            packing_s=self._packing_s(),
            single_sequence_s=self._single_sequence_s(),
        )

    def _packing_s(self) -> float:
        rollout, costs = self._config.rollout, self.costs
        responses = rollout.prompts_per_step * rollout.num_generations
        rng = np.random.default_rng([self._config.seed, 3])
        prompts = max(1, _BOUND_SAMPLES // rollout.num_generations)
        drawn = self._source.lengths.sample(rng, prompts, rollout.num_generations)
        lengths = np.minimum(drawn, self.cap).ravel().tolist()
        devices = costs.workers * costs.worker_devices
        whole = min(
            packing_bound_s(costs.engine(tp), devices // tp, lengths, max_running=costs.max_running)
            for tp in engine_sizes(self._calibration)
            if tp <= devices
        )
        return whole * responses / len(lengths)

    def _single_sequence_s(self) -> float:
        largest = max(engine_sizes(self._calibration))
        return single_sequence_s(self.costs.engine(largest), self.cap)


def engine_sizes(calibration: Calibration) -> list[int]:
    """Tensor-parallel sizes that hold the model, ascending."""
    if calibration.measured is not None:
        return [1]
    sizes: list[int] = []
    size = 1
    while size <= calibration.cluster().per_node:
        try:
            calibration.engine(size)
        except ValueError:
            pass
        else:
            sizes.append(size)
        size *= 2
    return sizes


def _worker_devices(config: SimulationConfig, calibration: Calibration) -> int:
    """Devices of the smallest engine: a planner may use any size, else the configured one."""
    if config.rollout.planner != "off":
        return engine_sizes(calibration)[0]
    return config.rollout_tp or calibration.rollout_tp


def machine_of(config: SimulationConfig, calibration: Calibration) -> Machine | None:
    """What the policy may know of the machines; None where no engine spans several devices."""
    if calibration.measured is not None:
        return None
    base = _worker_devices(config, calibration)
    device, shape = calibration.cluster().device, calibration.shape
    efficiency = calibration.efficiency
    return Machine(
        node_size=device.per_node,
        worker_devices=base,
        replica_devices=max(calibration.train_gpus, base),
        device_bytes=device.memory * efficiency.memory - efficiency.reserved,
        weight_bytes=shape.weight_bytes,
        heads=shape.heads,
        profiles={
            tp: _profile(calibration.engine(tp)) for tp in engine_sizes(calibration) if tp >= base
        },
        train_token_s=calibration.training(1).token_s,
    )


def _profile(engine: EngineCosts) -> EngineProfile:
    return EngineProfile(
        kv_tokens=engine.capacity,
        latency={batch: engine.step_s(batch, 0.0) for batch in _CURVE},
        context_token_s=engine.slope(1),
        prefill_token_s=engine.prefill_s(1.0),
    )


def world_costs(config: SimulationConfig, calibration: Calibration) -> WorldCosts:
    """The machines. Raises ``ValueError`` when they do not divide into replicas and engines."""
    gpus = config.gpus or calibration.gpus
    base = _worker_devices(config, calibration)
    replica = max(calibration.train_gpus, base)
    if gpus % replica or replica % base:
        raise ValueError(
            f"gpus={gpus} do not divide into training replicas of {replica} GPUs with engines "
            f"of {base}: change gpus or rollout_tp"
        )
    timeouts = TimeoutSettings()
    if not config.adaptive_timeout:
        timeouts = replace(timeouts, least=timeouts.most)
    phase = calibration.synchronous_reward_s
    asynchronous = asynchronous_grading(config.rollout, config.asynchronous_grading)
    return WorldCosts(
        workers=gpus // base,
        worker_devices=base,
        engine=lambda devices: calibration.engine(devices),
        max_running=config.max_running,
        replica=replica // base,
        train=calibration.training(replica),
        start_s=calibration.rollout_start_s,
        sync_s=calibration.weight_sync_s,
        apply_s=calibration.apply_s,
        rewards=calibration.rewards.costs(),
        kinds={name: domain.reward for name, domain in config.domains.items()},
        timeouts=timeouts,
        reward_phase_s=phase if config.reward_phase or not asynchronous else None,
    )


def _latency(costs: EngineCosts) -> dict[int, float]:
    """Seconds of a decode step by batch."""
    return {batch: costs.step_s(batch, float(batch * _CONTEXT)) for batch in _CURVE}
