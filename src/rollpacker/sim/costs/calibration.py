"""Calibration files: fitted values, their data, and the costs that follow.

Each experiment of the paper (RollPacker, arXiv 2509.21009) has a file in ``calibration/``.
``rollpacker calibrate`` writes such a file from a run of yours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from rollpacker.config import Config, load_as, parse_as
from rollpacker.policy.engines.hardware import Devices
from rollpacker.sim.costs.costs import (
    PROMPT_TOKENS,
    ROLLOUT_START_S,
    Ahead,
    CurveCosts,
    DriverCosts,
    Efficiency,
    EngineCosts,
    GpuCosts,
    RewardCosts,
    TrainCosts,
    engine_devices,
)
from rollpacker.sim.costs.hardware import MeasuredDevice, find_device
from rollpacker.sim.costs.models import ModelShape, find_model

FOLDER = Path(__file__).parents[1] / "calibration"
_MAX_RUNNING = 1024  # default for the sequences that an engine decodes together

_STAND_FOR = {
    "kappa": "a decode step over its roofline",
    "train_launch_s": "seconds that each response costs a training replica besides its tokens",
    "train_mfu": "share of the flops that training reaches",
    "weight_sync_s": "seconds of new weights to the engines, which grow with the model",
    "apply_s": "seconds of an update, which grow with the model",
    "synchronous_reward_s": "seconds of the reward phase of mode off, whatever the model",
}
"""Meaning of the fitted constants in other experiments."""


class Calibration(Config):
    """One experiment: its hardware, its workload and its fitted constants."""

    name: str
    """Name of the experiment."""
    device: str
    """A known GPU, or ``cpu`` with ``measured``."""
    model: str
    """A known model, or the path of a ``config.json``."""
    gpus: int = Field(ge=1)
    """Devices (CPU: workers) that roll out and train in turn."""
    rollout_tp: int = Field(default=1, ge=1)
    """Tensor-parallel size of the engines at the start."""
    train_gpus: int = Field(default=1, ge=1)
    """Devices of one data-parallel training replica."""
    prompts: int = Field(default=128, ge=1)
    """P0: prompts of an update."""
    responses: int = Field(default=8, ge=1)
    """R0: responses of a prompt."""
    response_cap: int = Field(ge=1)
    """Longest response, tokens."""
    prompt_tokens: int = Field(default=PROMPT_TOKENS, ge=0)
    """Mean prompt length."""
    kappa: float = Field(default=1.0, gt=0.0)
    """Factor of every decode step."""
    efficiency: Efficiency = Efficiency()
    """Terms of a decode step on a GPU."""
    train_launch_s: float = Field(default=0.0, ge=0.0)
    """Fixed seconds of each response in training."""
    train_mfu: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of flops that training reaches."""
    synchronous_reward_s: float = Field(default=0.0, ge=0.0)
    """Seconds of the reward phase without asynchronous rewards."""
    weight_sync_s: float = Field(default=0.0, ge=0.0)
    """Seconds of new weights to the engines."""
    apply_s: float = Field(default=0.0, ge=0.0)
    """Seconds of the gradients' reduction and the update."""
    rollout_start_s: float = Field(default=ROLLOUT_START_S, ge=0.0)
    """Seconds of every rollout's start."""
    rewards: RewardCosts = RewardCosts()
    measured: MeasuredDevice | None = None
    """Latencies of a CPU worker."""
    ahead: Ahead = Ahead()
    """Speculative decoding in the experiment."""
    driver: DriverCosts | None = None
    """Work of the driver and of grading, if workers have all cores."""
    fitted: dict[str, str]
    """Data that each value was fitted to, or that it is assumed."""

    @model_validator(mode="after")
    def _consistent(self) -> Calibration:
        unknown = sorted(set(self.fitted) - set(type(self).model_fields))
        if unknown:
            raise ValueError(f"fitted.{unknown[0]} is not a key of a calibration")
        if (self.device == "cpu") != (self.measured is not None):
            raise ValueError("device 'cpu' and the section 'measured' go together")
        for key in ("rollout_tp", "train_gpus"):
            if self.gpus % getattr(self, key):
                raise ValueError(f"gpus={self.gpus} is not a multiple of {key}")
        if self.measured is None:
            node = find_device(self.device).per_node
            if self.gpus > node and self.gpus % node:
                raise ValueError(f"gpus={self.gpus}: use 1 to {node}, or a multiple of {node}")
        self.engine()
        return self

    @property
    def shape(self) -> ModelShape:
        return find_model(self.model)

    def moved(self, model: str | None, device: str | None) -> Calibration:
        """Return the same constants for another model or other GPUs. Raises ``ValueError`` in
        one line if a name is unknown, or if the engines' size does not hold the model."""
        other = {"model": model or self.model, "device": device or self.device}
        if self.measured is not None and other != {"model": self.model, "device": self.device}:
            raise ValueError(
                f"calibration {self.name} was measured on a CPU with its own model: a model or "
                f"device cannot be replaced: take one of {', '.join(builtin())}"
            )
        source = f"calibration {self.name} with another model or device"
        return parse_as(Calibration, self.model_dump() | other, source)

    def carried_over(self, moved: Calibration) -> str | None:
        """Describe the constants of a calibration that was ``moved``. None if it was not."""
        if (self.model, self.device) == (moved.model, moved.device):
            return None
        values = self.model_dump()
        told = [
            f"{key}={values[key]:g} ({text})"
            for key, text in _STAND_FOR.items()
            if key in self.fitted
        ]
        smaller = moved.shape.count.total < self.shape.count.total / 2
        doubt = (
            "; weight_sync_s and apply_s are too long for so small a model: speed-ups are too small"
        )
        return (
            f"fitted to {self.model} on {self.device} and taken over for {moved.model} "
            f"({moved.shape.count.words}) on {moved.device}: {', '.join(told)}; sizes and "
            f"datasheets are the new ones'{doubt if smaller else ''}"
        )

    def devices(self, gpus: int | None = None) -> Devices:
        device = find_device(self.device)
        return engine_devices(device, self.shape, self.efficiency, gpus or self.gpus)

    def engine_sizes(self, gpus: int | None = None) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that hold the model on ``gpus`` (default: its own),
        ascending."""
        return (1,) if self.measured is not None else self.devices(gpus).sizes()

    @property
    def max_running(self) -> int:
        return (self.measured.max_running if self.measured else 0) or _MAX_RUNNING

    def engine(self, tp: int | None = None) -> EngineCosts:
        """Return the costs of one engine replica at ``tp`` (default: ``rollout_tp``, unused on a
        CPU)."""
        if self.measured is not None:
            return CurveCosts(self.measured)
        tp = self.rollout_tp if tp is None else tp
        device = find_device(self.device)
        return GpuCosts(
            device=device,
            shape=self.shape,
            tp=tp,
            kappa=self.kappa,
            efficiency=self.efficiency,
            longest=self.prompt_tokens + self.response_cap,
        )

    def training(self, gpus: int | None = None) -> TrainCosts:
        """Return the costs of one training replica of ``gpus`` (default: ``train_gpus``, unused
        on a CPU)."""
        if self.measured is not None:
            return TrainCosts(
                self.train_launch_s,
                self.measured.train_token_s,
                self.prompt_tokens,
                square_s=self.measured.train_square_s,
                task_s=self.measured.train_task_s,
            )
        return TrainCosts.on_gpus(
            find_device(self.device),
            self.shape,
            gpus=self.train_gpus if gpus is None else gpus,
            launch_s=self.train_launch_s,
            mfu=self.train_mfu,
        )


def builtin() -> list[str]:
    """Return the names of the calibrations that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def nearest(longest: int) -> Calibration:
    """Return the built-in one with the least cap that holds ``longest`` tokens, else the
    largest."""
    known = [load(name) for name in builtin()]
    return min(known, key=lambda c: (c.response_cap < longest, abs(c.response_cap - longest)))


def load(source: str | Path) -> Calibration:
    """Read a calibration by its built-in name or its path. Raises ``ValueError`` with one line
    that names the file and the key."""
    path = FOLDER / f"{source}.yaml" if source in builtin() else Path(source)
    if not path.exists():
        known = ", ".join(builtin())
        raise ValueError(f"{source}: no such calibration file; built in: {known}")
    return load_as(Calibration, path)


def dump(calibration: Calibration, path: Path) -> None:
    """Write a calibration file that ``load`` reads back."""
    data: dict[str, Any] = calibration.model_dump(mode="json", exclude_unset=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
