"""Our options in verl's configuration, and unsupported settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from rollpacker.config import RolloutConfig, parse_as
from rollpacker.config.base import Config
from rollpacker.config.rollout import SpeculationConfig, StreamingConfig, TailBatchingConfig
from rollpacker.policy.settings import RolloutSettings

MODE = "rollpacker"
"""The trainer's name (``trainer.v1.trainer_mode``), and the section with our options."""
DOMAIN = "default"


class VerlConfig(Config):
    """The section ``rollpacker`` of verl's configuration: ``+rollpacker.tail_batching.mode=race``.
    All other settings are verl's: prompts and responses of a step, lengths, sampling, data,
    rewards."""

    tail_batching: TailBatchingConfig = TailBatchingConfig()
    """How a round treats its long tail: mode ``exact``, ``off``, ``race`` or ``prompts``."""
    output: str | None = None
    """The folder of ``journal.jsonl``. Default: ``rollpacker`` in ``trainer.default_local_dir``."""
    max_retries: int = Field(default=2, ge=0)
    """Replacement attempts for a response whose server or reward failed."""


Check = Callable[[Any], bool]

_UNSUPPORTED: dict[str, Check] = {
    "algorithm.filter_groups.enable=True": lambda c: _set(c, "algorithm", "filter_groups.enable"),
    "algorithm.adv_estimator=remax": lambda c: c.algorithm.adv_estimator == "remax",
    "trainer.v1.sampler.custom_sampler": lambda c: _set(
        c, "trainer", "v1.sampler.custom_sampler.path"
    ),
    "trainer.v1.sampler.sync_refill_failed_groups=True": lambda c: _set(
        c, "trainer", "v1.sampler.sync_refill_failed_groups"
    ),
    "skip.rollout_tq.enable=True": lambda c: _set(c, "skip", "rollout_tq.enable"),
    "reward.reward_model.enable=True without reward.reward_model.enable_resource_pool=True": (
        lambda c: (
            _set(c, "reward", "reward_model.enable")
            and not _set(c, "reward", "reward_model.enable_resource_pool")
        )
    ),
    "actor_rollout_ref.rollout.full_determinism=True": lambda c: _set(
        c, "actor_rollout_ref", "rollout.full_determinism"
    ),
}
"""Settings that a run would silently ignore."""


def _set(config: Any, section: str, path: str) -> bool:
    node = config.get(section)
    for key in path.split("."):
        node = None if node is None else node.get(key)
    return bool(node)


def read(given: Any) -> VerlConfig:
    """Our options from plain values, None for none. Raises ``ValueError``, one line."""
    config = parse_as(VerlConfig, given or {}, MODE)
    tail = config.tail_batching
    if tail.mode == "auto":
        raise ValueError(
            f"{MODE}.tail_batching.mode: 'auto' needs measured decode latencies, which verl's "
            "servers do not report: use 'exact', 'off', 'race' or 'prompts'"
        )
    if tail.own:
        raise ValueError(
            f"{MODE}.tail_batching.mode: '{tail.mode}' may end a step with fewer groups than verl "
            "needs, so only rollpacker train takes rules of your own"
        )
    if tail.carries:
        raise ValueError(
            f"{MODE}.tail_batching.mode: 'partial' trains on tokens of earlier weights, which only "
            "rollpacker train keeps: use 'exact', 'off', 'race' or 'prompts'"
        )
    if tail.long_round_steps > 1:
        raise ValueError(
            f"{MODE}.tail_batching: long_round_steps must be 1: verl makes the updates of one "
            "round before the next"
        )
    if tail.unused:
        raise ValueError(
            f"{MODE}.tail_batching: {', '.join(tail.unused)} would do nothing in mode "
            f"'{tail.mode}': change the mode, or leave it out"
        )
    return config


def check_supported(config: Any) -> None:
    """Raise ``ValueError`` in one line for unsupported settings of verl."""
    found = [name for name, asks in _UNSUPPORTED.items() if asks(config)]
    if found:
        raise ValueError(
            f"trainer.v1.trainer_mode={MODE} does not support {', '.join(found)}: leave it out, "
            "or train with trainer.v1.trainer_mode=sync"
        )


def rollout_settings(ours: VerlConfig, config: Any, prompts: int) -> RolloutSettings:
    """The policy's settings, from verl's configuration."""
    rollout = config.actor_rollout_ref.rollout
    section = RolloutConfig(
        prompts_per_step=config.data.train_batch_size,
        num_generations=rollout.n,
        max_completion_length=rollout.response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=max(0, rollout.top_k),
        tail_batching=ours.tail_batching,
        max_retries=ours.max_retries,
        # verl trains when it has the whole batch, and never changes its servers.
        streaming=StreamingConfig(enabled=False),
        speculation=SpeculationConfig(mode="off"),
    )
    return RolloutSettings.of(
        section,
        seed=config.data.get("seed") or 0,
        sizes={DOMAIN: prompts},
        cap=rollout.response_length,
        # Unknown, but only ``auto`` and streaming use it.
        latency={1: 1.0},
        engines=1,
        whole_batch=True,
    )
