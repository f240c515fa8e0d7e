"""What the policy is told of a run's devices, from what its engines measured."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.policy.engines.device_split import replica_size
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, measured
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.train.model.card import Card


def machine_of(config: RunConfig, card: Card, pool: WorkerPool) -> Hardware | None:
    """What the planner, or the rule that frees devices, asks; None where neither does."""
    rules = config.rollout
    plain = rules.planner == "off" and rules.streaming.scaling == "consolidate"
    if plain and not _compares(config, pool):
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


def _compares(config: RunConfig, pool: WorkerPool) -> bool:
    """Whether moves of the tail are compared by what they cost, instead of waiting for a number of
    attempts: that which was given, or of which contexts without a cost make too many."""
    return (
        len(pool.engines) > 1
        and pool.info.context_token_s is not None
        and config.rollout.streaming.consolidate_below == "auto"
        # Ordered gradients wait for the rollout's end, and a tail may have to leave its nodes.
        and not config.deterministic
        and not config.mux.url
    )
