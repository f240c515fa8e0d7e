"""The configuration of ``rollpacker simulate``, and a calibration's simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import Field, field_validator, model_validator

from rollpacker.config import CodeTimeoutConfig, Config, RolloutConfig
from rollpacker.policy.engines.fleet import Fleet, Layout, colocated, grid, separate
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, measured
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import Ahead, DriverCosts, EngineCosts, RewardCosts, TrainCosts
from rollpacker.sim.workload.workload import ToolKv
from rollpacker.sim.world.grading import RewardKind

# --- The job that is simulated


class DomainConfig(Config):
    """One task domain of a workload."""

    share: float = Field(default=1.0, gt=0.0)
    """Weight among the domains."""
    reward: RewardKind = "math"
    """Kind of its rewards: ``none`` (no time), ``math``, ``code`` or ``judge``."""


class SimulationConfig(Config):
    """One simulated job."""

    calibration: str
    """Costs: a built-in calibration, or a file that ``rollpacker calibrate`` wrote."""
    model: str | None = None
    """Another model than the calibration's: a known one, or the path of a ``config.json``."""
    device: str | None = None
    """Other GPUs than the calibration's, by name."""
    workload: str
    """Lengths: a shipped or fitted workload model, or a trace, whose prompts come first."""
    task: str | None = None
    """Task of a trace that holds several."""
    steps: int = Field(default=40, ge=1)
    """Steps of the job."""
    seed: int = 0
    """Seed of lengths and of the policy's synthetic rounds."""
    rollout: RolloutConfig = RolloutConfig(prompts_per_step=128)
    """As in a run's configuration."""
    asynchronous_grading: bool | None = None
    """Grade responses as they finish. Default: in every mode except ``off``."""
    reward_phase: bool = False
    """Rewards follow the rollout and take ``synchronous_reward_s``."""
    balanced_training: bool = True
    """Free replicas take gradient work. False: replicas take turns."""
    adaptive_timeout: bool = True
    """Adaptive timeouts of code rewards. False: always the longest."""
    domains: dict[str, DomainConfig] = Field(
        default={"default": DomainConfig(reward="none")}, min_length=1
    )
    """Task domains. The prompts of a step are split by their shares."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs, if not the calibration's."""
    layout: Layout = "colocated"
    """``colocated``: all GPUs roll out and train in turn. ``separate``: ``training_gpus`` of
    them train, the others roll out."""
    training_gpus: int | None = Field(default=None, ge=1)
    """GPUs that train, if ``separate``."""
    rollout_tp: int | None = Field(default=None, ge=1)
    """Tensor-parallel size of engines, if not the calibration's."""
    tool_kv: ToolKv = "cached"
    """KV of a response that waits for tools: ``cached`` (as in vLLM), ``kept`` or ``dropped``."""
    ahead: Ahead | None = None
    """Speculative decoding, if not the calibration's."""
    max_running: int | None = Field(default=None, ge=1)
    """Most sequences of an engine. Default: the calibration's, or 1,024."""

    @field_validator("domains")
    @classmethod
    def _named(cls, value: dict[str, DomainConfig]) -> dict[str, DomainConfig]:
        if any(not name for name in value):
            raise ValueError("a domain needs a name")
        return value

    @model_validator(mode="after")
    def _split(self) -> SimulationConfig:
        if self.layout == "separate" and self.training_gpus is None:
            raise ValueError("layout: separate needs training_gpus, how many of the gpus train")
        if self.layout == "colocated" and self.training_gpus is not None:
            raise ValueError("training_gpus: with layout: colocated all gpus train: set separate")
        return self


_CURVE = tuple(2**power for power in range(11))  # batch sizes of the policy's latency curve
SLEEP_S = 0.5
"""Seconds in which an engine frees or takes its memory. Assumed, not yet measured on a GPU."""
CONTEXT = 1024  # context of each sequence in the policy's latency curve, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCosts:
    """Costs on the simulated machines. Times in seconds.

    Args:
        fleet: engines of the smallest size, and training replicas of one size.
        start_s: once per rollout.
        sync_s: new weights to the engines.
        apply_s: reduce and update.
        reward_phase_s: length of a reward phase after the rollout. None: rewards are a service.
        driver: work of the driver on the workers' cores. None if it has its own.
    """

    fleet: Fleet
    engine: Callable[[int], EngineCosts]
    max_running: int = 1024
    tool_kv: ToolKv = "cached"
    train: TrainCosts
    start_s: float = 0.0
    sync_s: float = 0.0
    apply_s: float = 0.0
    rewards: RewardCosts = field(default_factory=RewardCosts)
    kinds: dict[str, RewardKind] = field(default_factory=dict[str, RewardKind])
    timeouts: CodeTimeoutConfig = field(default_factory=CodeTimeoutConfig)
    reward_phase_s: float | None = None
    ahead: Ahead = field(default_factory=Ahead)
    driver: DriverCosts | None = None

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        *,
        fleet: Fleet,
        kinds: dict[str, RewardKind],
        reward_phase: bool,
    ) -> WorldCosts:
        return cls(
            fleet=fleet,
            engine=calibration.engine,
            max_running=calibration.max_running,
            train=calibration.training(len(next(iter(fleet.replicas.values())))),
            start_s=calibration.rollout_start_s,
            sync_s=calibration.weight_sync_s,
            apply_s=calibration.apply_s,
            rewards=calibration.rewards,
            kinds=kinds,
            reward_phase_s=calibration.synchronous_reward_s if reward_phase else None,
            ahead=calibration.ahead,
            driver=calibration.driver,
        )


def fleet_of(config: SimulationConfig, calibration: Calibration) -> Fleet:
    """Return engines and replicas of a job, with training devices after those of rollout. Raises
    ``ValueError`` if its devices do not divide into them."""
    gpus, training = config.gpus or calibration.gpus, config.training_gpus
    engine, replica = engine_devices(config, calibration), replica_devices(config, calibration)
    devices = grid(gpus, gpus if calibration.measured else calibration.devices(gpus).node_size)
    if training is None:
        if replica % engine:
            raise ValueError(
                f"rollout_tp={engine}: training replicas of {replica} GPUs do not divide into "
                "engines of as many: change it"
            )
        if gpus % replica:
            other = ", or another rollout_tp" if config.rollout_tp else ""
            raise ValueError(
                f"gpus={gpus} do not divide into training replicas of {replica} GPUs: take a "
                f"multiple of {replica}{other}"
            )
        calibration.engine(engine)  # says which sizes the model can have
        return colocated(devices, tensor_parallel=engine, replica=replica)
    rollout = rollout_gpus(config, calibration)
    if rollout % engine or training % replica:
        raise ValueError(
            f"training_gpus={training} of gpus={gpus}: {training} must divide into training "
            f"replicas of {replica} GPUs and {rollout} into engines of {engine}: change "
            "training_gpus, gpus or rollout_tp"
        )
    calibration.engine(engine)
    return separate(devices[:rollout], devices[rollout:], tensor_parallel=engine, replica=replica)


def rollout_gpus(config: SimulationConfig, calibration: Calibration) -> int:
    """Return the number of devices that decode. Raises ``ValueError`` if none is left."""
    gpus, training = config.gpus or calibration.gpus, config.training_gpus or 0
    if training >= gpus:
        raise ValueError(
            f"training_gpus={training} of gpus={gpus} leaves none for rollout: change training_gpus"
        )
    return gpus - training


def engine_devices(config: SimulationConfig, calibration: Calibration) -> int:
    """Return the devices of the smallest engine: of any size with a planner, else as configured."""
    if config.rollout.planner != "off":
        return calibration.engine_sizes(rollout_gpus(config, calibration))[0]
    return config.rollout_tp or calibration.rollout_tp


def replica_devices(config: SimulationConfig, calibration: Calibration) -> int:
    """Return the devices of a training replica. A colocated one holds at least one engine."""
    if config.layout == "separate":
        return calibration.train_gpus
    return max(calibration.train_gpus, engine_devices(config, calibration))


def machine_of(
    config: SimulationConfig, calibration: Calibration, *, grows: bool = True
) -> Hardware | None:
    """Return the hardware that the policy may know. None if it does not use it, as in runs.
    ``grows``: engines of the tail may be joined into larger ones."""
    rules = config.rollout
    ordered = calibration.measured is not None and not config.balanced_training
    if rules.planner == "off" and (ordered or rules.streaming.scaling == "off"):
        return None
    base = engine_devices(config, calibration)
    if calibration.measured is not None:
        gpus = rollout_gpus(config, calibration)
        profiles = {base: _profile(calibration.engine(base))}
        return measured(profiles, devices=gpus, node_size=gpus) if gpus > base else None
    devices = calibration.devices(rollout_gpus(config, calibration))
    return Hardware(
        node_size=devices.node_size,
        engine_devices=base,
        replica_devices=replica_devices(config, calibration),
        profiles={
            n: _profile(calibration.engine(n))
            for n in (devices.sizes() if grows else (base,))
            if n >= base
        },
        train_token_s=calibration.training(1).token_s,
    )


def _profile(engine: EngineCosts) -> EngineProfile:
    return EngineProfile(
        kv_tokens=engine.capacity,
        latency=bare_curve(engine),
        context_token_s=engine.slope,
        prefill_token_s=engine.prefill_s(1.0),
    )


def bare_curve(costs: EngineCosts) -> dict[int, float]:
    """Return seconds of a decode step by batch, without the cost of contexts."""
    return {batch: costs.step_s(batch, 0.0) for batch in _CURVE}


def latency_curve(costs: EngineCosts) -> dict[int, float]:
    """Return seconds of a decode step by batch, at the policy's context."""
    return {batch: costs.step_s(batch, float(batch * CONTEXT)) for batch in _CURVE}
