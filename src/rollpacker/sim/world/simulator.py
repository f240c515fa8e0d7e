"""The simulated driver: the real policy of a job over cost models, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollpacker.config import CodeTimeoutConfig, TrainConfig
from rollpacker.core.pump import Record
from rollpacker.policy.engines.hardware import LatencyCurve, RowCosts
from rollpacker.policy.engines.speculation import MOST
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import (
    USUAL_MICRO_BATCH,
    RolloutSettings,
    asynchronous_grading,
)
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import EngineCosts, packing_bound_s, single_sequence_s
from rollpacker.sim.workload.source import LengthSource
from rollpacker.sim.workload.workload import DrawnWorkload
from rollpacker.sim.world.machines import (
    CONTEXT,
    SimulationConfig,
    WorldCosts,
    fleet_of,
    latency_curve,
    machine_of,
    rollout_gpus,
)
from rollpacker.sim.world.step import JobResult, StepResult
from rollpacker.sim.world.world import World

_BOUND_SAMPLES = 4096


class Simulation:
    """One job on simulated machines. Raises ``ValueError`` if the machines cannot run it.
    ``record`` takes every event with its decisions. ``grows``: larger engines may take over a
    tail, which runs allow only with a planner."""

    def __init__(
        self,
        config: SimulationConfig,
        calibration: Calibration,
        source: LengthSource,
        record: Record | None = None,
        *,
        grows: bool = True,
    ) -> None:
        if config.rollout.tail_batching.carries and source.turns is not None:
            raise ValueError(
                "rollout.tail_batching.mode=partial cannot carry responses with tools over to the "
                "next step, neither here nor in runs: take another mode"
            )
        self._config = config
        self._source = source
        self._calibration = calibration
        self._grows = grows
        self.costs = world_costs(config, calibration)
        self._sizes = calibration.engine_sizes(rollout_gpus(config, calibration))
        self.cap = config.rollout.max_completion_length or source.cap or calibration.response_cap
        self._workload = DrawnWorkload(
            source.lengths,
            domains={name: domain.share for name, domain in config.domains.items()},
            prompt_tokens=source.prompt_tokens or calibration.prompt_tokens,
            seed=config.seed,
            recorded=source.recorded,
            turns=source.turns,
        )
        self.policy = RolloutPolicy(self._settings())
        self._world = World(
            self.policy,
            self._workload,
            self.costs,
            measure=self.policy.settings.machine is not None,
            record=record,
        )

    def _settings(self) -> RolloutSettings:
        config, costs = self._config, self.costs
        engine = costs.engine(costs.fleet.tp)
        return RolloutSettings.of(
            config.rollout,
            seed=config.seed,
            sizes=self._workload.sizes,
            cap=self.cap,
            latency=latency_curve(engine),
            engines=len(costs.fleet.engines),
            whole_batch=config.reward_phase,
            asynchronous=config.asynchronous_grading,
            ordered=not config.balanced_training,
            machine=machine_of(config, self._calibration, grows=self._grows),
            rows=self._rows(engine),
            layout=config.layout,
            micro_batch_tokens=(
                USUAL_MICRO_BATCH
                if self._calibration.measured is None
                else TrainConfig().micro_batch_tokens
            ),
        )

    def _rows(self, engine: EngineCosts) -> RowCosts | None:
        ahead = self.costs.ahead
        if not ahead.possible:
            return None
        if self._calibration.measured is not None:
            return LatencyCurve(latency_curve(engine)).rows()
        row_s = (engine.drafts_s(1, 1 + MOST, ahead) - engine.drafts_s(1, 1, ahead)) / MOST
        return RowCosts(free=0, each=max(row_s / engine.step_s(1, float(CONTEXT)), 1e-4))

    def steps(self) -> Iterator[StepResult]:
        for number in range(self._config.steps):
            yield self._world.run_step(number)

    def run(self) -> JobResult:
        steps = list(self.steps())
        return JobResult(
            steps=steps,
            kept_vs_true_len=self._world.kept_vs_true_len,
            packing_s=self._packing_s(),
            cap=self.cap,
            single_sequence_s=single_sequence_s(self.costs.engine(self._sizes[-1]), self.cap),
        )

    def _packing_s(self) -> float:
        rollout, costs = self._config.rollout, self.costs
        responses = rollout.prompts_per_step * rollout.num_generations
        rng = np.random.default_rng([self._config.seed, 3])
        prompts = max(1, _BOUND_SAMPLES // rollout.num_generations)
        drawn = self._source.lengths.sample(rng, prompts, rollout.num_generations)
        lengths = np.minimum(drawn, self.cap).ravel().tolist()
        devices = len(costs.fleet.engines) * costs.fleet.tp
        whole = min(
            packing_bound_s(costs.engine(tp), devices // tp, lengths, max_running=costs.max_running)
            for tp in self._sizes
            if tp <= devices
        )
        return whole * responses / len(lengths)


def world_costs(config: SimulationConfig, calibration: Calibration) -> WorldCosts:
    """Return the machines of a job. Raises ``ValueError`` if they do not divide into its parts."""
    timeouts = CodeTimeoutConfig(adaptive=config.adaptive_timeout)
    asynchronous = asynchronous_grading(config.rollout, config.asynchronous_grading)
    costs = WorldCosts.of(
        calibration,
        fleet=fleet_of(config, calibration),
        kinds={name: domain.reward for name, domain in config.domains.items()},
        reward_phase=config.reward_phase or not asynchronous,
    )
    running, tool_kv = config.max_running or costs.max_running, config.tool_kv
    ahead = config.ahead or costs.ahead
    return replace(costs, timeouts=timeouts, max_running=running, tool_kv=tool_kv, ahead=ahead)
