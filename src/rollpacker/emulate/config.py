"""The file of ``devices.emulate``: the machine, the lengths, and the speed of time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pydantic import Field

from rollpacker.config import Config, RunConfig, load_as
from rollpacker.policy.settings import asynchronous_grading
from rollpacker.sim.costs import calibration
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import Ahead
from rollpacker.sim.workload.source import LengthSource, load_source
from rollpacker.sim.workload.workload import DrawnWorkload
from rollpacker.sim.world.grading import RewardKind


class EmulationConfig(Config):
    """The devices of an emulated run. The first drawn prompt has the lengths of the workload's
    first prompt, whatever its text."""

    calibration: str
    """Costs: a built-in calibration, or a file of ``rollpacker calibrate``."""
    model: str | None = None
    """Another model than the calibration's."""
    device: str | None = None
    """Other GPUs than the calibration's, by name."""
    workload: str
    """Lengths: a shipped or fitted workload model, or a trace."""
    task: str | None = None
    """The task, if a trace holds several."""
    rewards: dict[str, RewardKind] = Field(default={})
    """Kind of each domain's rewards, for ``rollpacker.emulate.reward:Timed``: ``none`` (no time),
    ``math`` (the default: the trace's time, if any), ``code``, or ``judge`` (as on idle
    devices)."""
    ahead: Ahead | None = None
    """Speculative decoding, if not the calibration's."""
    factor: float = Field(default=50.0, gt=0.0)
    """Emulated seconds in one second of real time."""
    processes: int = Field(default=1, ge=1)
    """Processes that hold a node's devices."""


class Emulated:
    """The devices of an emulated run, read from their files. Raises ``ValueError`` in one line for
    a file that cannot be read or emulated."""

    def __init__(self, run: RunConfig) -> None:
        assert run.devices.emulate is not None
        self.run = run
        self.config = load_as(EmulationConfig, Path(run.devices.emulate))
        self.source: LengthSource = load_source(self.config.workload, self.config.task)
        self.calibration: Calibration = _as_traced(
            calibration.load(self.config.calibration).moved(self.config.model, self.config.device),
            self.source,
        )
        if self.source.turns is not None or any(each.turns for each in self.source.recorded):
            raise ValueError(
                f"{run.devices.emulate}: workload={self.config.workload} has responses of several "
                "turns, which emulated runs do not support: choose another one"
            )

    @property
    def ahead(self) -> Ahead:
        return self.config.ahead or self.calibration.ahead

    @property
    def prompt_tokens(self) -> int:
        """The length of every prompt, as in a simulation."""
        return self.source.prompt_tokens or self.calibration.prompt_tokens

    def workload(self, domains: Mapping[str, float]) -> DrawnWorkload:
        """Lengths of prompts by domain. The values are the domains' shares of draws."""
        return DrawnWorkload(
            self.source.lengths,
            domains=domains,
            prompt_tokens=self.prompt_tokens,
            seed=self.run.seed,
            recorded=self.source.recorded,
        )

    def kind(self, domain: str) -> RewardKind:
        return self.config.rewards.get(domain, "math")

    @cached_property
    def asynchronous(self) -> bool:
        return asynchronous_grading(self.run.rollout, self.run.grading.asynchronous)

    @property
    def publish_s(self) -> float:
        """Emulated seconds from an update to the first requests of the next step."""
        return self.calibration.weight_sync_s + self.calibration.rollout_start_s


def _as_traced(costs: Calibration, source: LengthSource) -> Calibration:
    times = source.rewards
    if times is None:
        return costs
    phase = costs.synchronous_reward_s if times.phase_s is None else times.phase_s
    rewards = costs.rewards.model_copy(update={"math_s": times.each_s})
    return costs.model_copy(update={"synchronous_reward_s": phase, "rewards": rewards})
