"""What a run counts, and how ``summary.json`` says it."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.record.metrics import OFTEN, Metrics
from rollpacker.runtime.step.step import StepRecord

_ENDS = 10
"""Steps of a run's beginning and of its end that are compared."""


@dataclass(slots=True)
class Counters:
    """What a run counts; saved with every checkpoint."""

    step: int = 0
    epochs: int = 0
    prompts_trained: int = 0
    num_tokens: int = 0
    kept_tokens: int = 0
    aborted_tokens: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    short_rounds: int = 0
    long_rounds: int = 0
    deferred: int = 0
    rollout_s: float = 0.0
    train_s: float = 0.0
    step_s: float = 0.0
    worker_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0
    driver_cpu_s: float = 0.0
    true_tokens: float = 0.0
    untaught: int = 0
    """Steps whose groups had no advantages, or that had no groups."""
    first_rewards: list[float] = field(default_factory=list[float])
    last_rewards: list[float] = field(default_factory=list[float])
    """Mean rewards of the first ``_ENDS`` steps that had some, and of the last."""

    def state_dict(self) -> dict[str, Any]:
        """All of them, as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def add(self, record: StepRecord) -> None:
        """A step has ended."""
        kept = sum(attempt.tokens for attempt in record.kept)
        self.step += 1
        self.prompts_trained += len(record.trained)
        self.kept_tokens += kept
        self.num_tokens += kept + sum(len(a.prompt_tokens) for a in record.kept)
        self.aborted_tokens += record.aborted_tokens()
        self.short_rounds += record.kind == "short"
        self.long_rounds += record.kind == "long"
        self.deferred += len(record.deferred)
        self.rollout_s += record.rollout_end_s - record.start_s
        self.step_s += record.end_s - record.start_s
        self.train_s += record.end_s - record.rollout_end_s

    def measure(self, record: StepRecord, metrics: Metrics, kept_vs_true: float) -> None:
        """What only the metrics of that step tell."""
        if kept_vs_true:  # else all that was kept lately is empty
            self.true_tokens += sum(attempt.tokens for attempt in record.kept) / kept_vs_true
        if math.isfinite(reward := float(metrics.get("reward", math.nan))):
            self.first_rewards = [*self.first_rewards, reward][:_ENDS]
            self.last_rewards = [*self.last_rewards, reward][-_ENDS:]
        self.decode_steps += int(metrics["engine/steps"])
        self.generated_tokens += int(metrics["engine/generated_tokens"])
        self.worker_cpu_s += float(metrics["timing_s/worker_cpu"])
        self.decode_cpu_s += float(metrics["timing_s/decode_cpu"])

    def lesson(self) -> str | None:
        """What is to be said at the end of steps that taught nothing, or the wrong thing."""
        if self.untaught < OFTEN * max(self.step, 1):
            return self._worse()
        return (
            f"WARNING {self.untaught} of {self.step} steps taught nothing: no group had rewards "
            "that differ; check 'rewards', or take problems of another difficulty"
        )

    def _worse(self) -> str | None:
        """Whether most of its last steps are worse than all of its first."""
        first, last = self.first_rewards, self.last_rewards
        few = self.step < 2 * _ENDS or len(last) < _ENDS
        if few or statistics.median(last) >= min(first):
            return None
        return (
            "WARNING the run ends worse than it began: a mean reward of "
            f"{statistics.fmean(last):.3g} in its last {_ENDS} steps, of "
            f"{statistics.fmean(first):.3g} in its first; lower train.learning_rate"
        )

    def summary(self) -> dict[str, Any]:
        """Their part of ``summary.json``."""
        return {
            "steps": self.step,
            "steps_without_learning": self.untaught,
            "prompts_trained": self.prompts_trained,
            "epochs": self.epochs,
            "num_tokens": self.num_tokens,
            "kept_tokens": self.kept_tokens,
            "decoded_tokens": self.generated_tokens,
            "decode_steps": self.decode_steps,
            "timing_s": {
                "rollout": self.rollout_s,
                "train": self.train_s,
                "steps": self.step_s,
                "worker_cpu": self.worker_cpu_s,
                "decode_cpu": self.decode_cpu_s,
                "driver_cpu": self.driver_cpu_s,
            },
            "tail": {
                "short_rounds": self.short_rounds,
                "long_rounds": self.long_rounds,
                "deferred": self.deferred,
                "aborted_tokens": self.aborted_tokens,
                "kept_vs_true_len": self.kept_tokens / self.true_tokens
                if self.true_tokens
                else 1.0,
            },
        }


def cores(config: RunConfig) -> dict[str, int]:
    """Cores that a run on a CPU may use, and those of its workers; empty on GPUs."""
    places = [device for device, _ in worker_devices(config)]
    if places[0] != "cpu":
        return {}
    pins = hasattr(os, "sched_getaffinity")
    usable = len(os.sched_getaffinity(0)) if pins else os.cpu_count() or 1
    return {"all": usable, "workers": len(places) * config.devices.threads}
