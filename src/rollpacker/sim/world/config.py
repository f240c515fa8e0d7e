"""What ``rollpacker simulate`` takes: a job, a workload and machines."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from rollpacker.config import Config, RolloutConfig
from rollpacker.policy.engines.fleet import Layout
from rollpacker.sim.costs.ahead import Ahead
from rollpacker.sim.workload.sequences import ToolKv
from rollpacker.sim.world.grading import RewardKind


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
    """Lengths: a shipped or fitted workload model, or a trace (its prompts come first)."""
    task: str | None = None
    """Task of a trace that holds several."""
    steps: int = Field(default=40, ge=1)
    """Steps of the job."""
    seed: int = 0
    """Seed of lengths and of the policy's synthetic rounds."""
    rollout: RolloutConfig = RolloutConfig(prompts_per_step=128)
    """As in a run's configuration."""
    asynchronous_grading: bool | None = None
    """Grade responses as they finish; default: in every mode but ``off``."""
    reward_phase: bool = False
    """Rewards follow the rollout and take ``synchronous_reward_s``."""
    balanced_training: bool = True
    """Free replicas take gradient work; false: in turn."""
    adaptive_timeout: bool = True
    """Adaptive timeouts of code rewards; false: always the longest."""
    domains: dict[str, DomainConfig] = Field(
        default={"default": DomainConfig(reward="none")}, min_length=1
    )
    """Task domains; prompts of a step are split by their shares."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs, when not the calibration's."""
    layout: Layout = "colocated"
    """``colocated``: all GPUs roll out and train in turn; ``separate``: ``training_gpus`` of them
    train, the others roll out."""
    training_gpus: int | None = Field(default=None, ge=1)
    """GPUs that train, if ``separate``."""
    rollout_tp: int | None = Field(default=None, ge=1)
    """Tensor-parallel size of engines, when not the calibration's."""
    tool_kv: ToolKv = "cached"
    """KV of a response that waits for tools: ``cached`` (as vLLM), ``kept`` or ``dropped``."""
    ahead: Ahead | None = None
    """Decoding ahead, when not the calibration's."""
    max_running: int | None = Field(default=None, ge=1)
    """Most sequences of an engine; default: the calibration's, or 1,024."""

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
            raise ValueError("training_gpus: with layout: colocated all gpus train; set separate")
        return self
