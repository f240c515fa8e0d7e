"""The simulated driver: the real policy of a job over cost models, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollpacker.core.pump import Record
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
        self._world = World(self.policy, self._workload, self.costs, cap=self.cap, record=record)

    def _settings(self) -> RolloutSettings:
        config, costs = self._config, self.costs
        latency = _latency(costs.engine, costs.engines)
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
            ),
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
        engines = costs.workers * costs.engines
        whole = packing_bound_s(costs.engine, engines, lengths, max_running=costs.max_running)
        return whole * responses / len(lengths)

    def _single_sequence_s(self) -> float:
        calibration = self._calibration
        best = self.costs.engine
        if calibration.measured is None:
            for tp in (2, 4, 8):
                try:
                    best = calibration.engine(tp)
                except ValueError:
                    continue
        return single_sequence_s(best, self.cap)


def world_costs(config: SimulationConfig, calibration: Calibration) -> WorldCosts:
    """The machines. Raises ``ValueError`` when they do not divide into workers."""
    gpus = config.gpus or calibration.gpus
    tp = config.rollout_tp or calibration.rollout_tp
    replica = max(calibration.train_gpus, tp)
    if gpus % replica or replica % tp:
        raise ValueError(
            f"gpus={gpus} do not divide into training replicas of {replica} GPUs with engines "
            f"of {tp}: change gpus or rollout_tp"
        )
    engines = replica // tp
    if config.engines_per_worker != "auto":
        engines = config.engines_per_worker
    timeouts = TimeoutSettings()
    if not config.adaptive_timeout:
        timeouts = replace(timeouts, least=timeouts.most)
    phase = calibration.synchronous_reward_s
    asynchronous = asynchronous_grading(config.rollout, config.asynchronous_grading)
    return WorldCosts(
        workers=gpus // replica,
        engines=engines,
        engine=calibration.engine(tp),
        max_running=config.max_running,
        train=calibration.training(replica),
        start_s=calibration.rollout_start_s,
        sync_s=calibration.weight_sync_s,
        rewards=calibration.rewards.costs(),
        kinds={name: domain.reward for name, domain in config.domains.items()},
        timeouts=timeouts,
        reward_phase_s=phase if config.reward_phase or not asynchronous else None,
    )


def _latency(costs: EngineCosts, engines: int) -> dict[int, float]:
    """Seconds of a decode step of a worker by its batch, spread over its engines."""
    return {batch * engines: costs.step_s(batch, float(batch * _CONTEXT)) for batch in _CURVE}
