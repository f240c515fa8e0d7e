"""KV blocks of a budget, by what vLLM itself says that a model's layers keep.

Layers of one kind are a group (``kv_cache_spec``): full attention, windows, latent attention, the
states of a mamba. A sequence takes its blocks for each group from one pool: by its tokens, or as
many of states whatever its length.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an engine is to have room for, where it does not take what is left of its GPU: so many
    tokens, or with 0 all of as many of the longest sequences as may run at once, where there is
    memory for that."""

    tokens: int = 0
    running: int


class Budgeted(Executor):
    """An executor that is asked for memory once its model is there, and has no KV cache yet."""

    budget: Budget | None = None

    def determine_available_memory(self) -> list[int]:
        """Bytes of each worker; where blocks are given, vLLM takes those instead."""
        found: list[int] = super().determine_available_memory()
        budget, config = self.budget, self.vllm_config
        if budget is None:
            return found
        (layers,) = self.get_kv_cache_specs()
        groups = get_kv_cache_groups(config, dict(layers))
        specs = [group.kv_cache_spec for group in groups]
        if budget.tokens:
            # One is vLLM's own.
            config.cache_config.num_gpu_blocks_override = 1 + _blocks(specs, budget, config)
            return found
        wanted = 1 + budget.running * sum(_longest(spec, config) for spec in specs)
        return [min(size, wanted * max(map(_bytes, groups))) for size in found]


def _blocks(specs: Sequence[Any], budget: Budget, config: Any) -> int:
    """The pool in which a budget in tokens has room, be it one sequence or several."""
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    rows = [spec for spec in specs if spec not in states]
    partly = len(rows) > 1  # a window begins within a block
    return sum(budget.running * _longest(spec, config) for spec in states) + sum(
        max(1, budget.tokens // spec.block_size) + partly for spec in rows
    )


def _bytes(group: Any) -> int:
    """Of one block of all layers of a group."""
    spec = group.kv_cache_spec
    several = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return several * spec.page_size_bytes


def _longest(spec: Any, config: Any) -> int:
    """Blocks of a group that the longest sequence takes."""
    return -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)


def room(scheduler: Any, config: Any) -> int:
    """Tokens of the longest sequences that a built engine has room for together."""
    groups = [each.kv_cache_spec for each in scheduler.kv_cache_config.kv_cache_groups]
    block, context = config.cache_config.block_size, config.model_config.max_model_len
    usable = config.cache_config.num_gpu_blocks - 1  # one is vLLM's own
    whole = -(-context // block) * block
    return usable * whole // sum(_longest(spec, config) for spec in groups)
