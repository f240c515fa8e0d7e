"""What the policy is told of a run's devices, from what its engines measured."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.policy.engines.device_split import replica_size
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, measured
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.train.model.loading import Card


def machine_of(config: RunConfig, card: Card, pool: WorkerPool) -> Hardware | None:
    """What the planner, or the rule that frees devices, asks; None where neither does."""
    # Ordered gradients wait for the rollout's end: there is nothing to free devices for.
    stays = len(pool.engines) < 2 or config.deterministic
    rules = config.rollout
    if rules.planner == "off" and (stays or rules.streaming.scaling == "off"):
        return None
    profiles = {
        size: EngineProfile(
            kv_tokens=info.kv_tokens,
            latency=info.latency,
            context_token_s=info.context_token_s or 0.0,
            prefill_token_s=info.prefill_token_s,
        )
        for size, info in pool.infos.items()
    }
    colocated = config.devices.layout == "colocated"
    decoding = len(pool.engines) * min(profiles)
    return measured(
        profiles,
        devices=decoding,
        node_size=pool.node_size,
        replica_devices=replica_size(config, decoding) if colocated else None,
        heads=card.heads,
        kv_heads=card.kv_heads,
    )
