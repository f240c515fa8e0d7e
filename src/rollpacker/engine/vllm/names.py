"""Names of vLLM's that are no interface of it and that this adapter relies on, looked for as an
engine is built: one that another version calls otherwise is told in one line."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import vllm
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import Request

_ALWAYS = {
    "engine": (
        "abort_request",
        "collective_rpc",
        "engine_core.engine_core.scheduler",
        "engine_core.shutdown",
        "model_config.enable_sleep_mode",
        "model_config.get_vocab_size",
        "model_config.max_model_len",
        "reset_prefix_cache",
        "sleep",
        "vllm_config.speculative_config",
        "wake_up",
    ),
    "scheduler": (
        "get_request_counts",
        "kv_cache_config.kv_cache_groups",
        "kv_cache_manager.usage",
        "requests",
        "running",
    ),
    # What a subclass has anyway is looked for in vLLM's own.
    "class Scheduler": ("_preempt_request", "schedule"),
    "class SchedulerOutput": (
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "total_num_scheduled_tokens",
    ),
    "class KVCacheGroupSpec": ("kv_cache_spec",),
    "class CompletionOutput": ("finish_reason", "routed_experts", "token_ids"),
    "request": (
        "num_computed_tokens",
        "num_output_tokens",
        "num_tokens",
        "request_id",
        "sampling_params",
    ),
    "second model runner's rows": ("expanded_idx_mapping", "input_ids"),
}
_FOR_DRAFTS = {
    "scheduler": (
        "kv_cache_manager.block_pool.get_num_free_blocks",
        "max_num_scheduled_tokens",
        "num_spec_tokens",
    ),
    "request": ("spec_token_ids",),
    "class CachedRequestState": ("sampling_params",),
    "model runner": (
        "cudagraph_dispatcher.uniform_decode_query_len",
        "effective_drafter_max_model_len",
        "input_batch.req_ids",
        "input_batch.sampling_metadata",
        "input_batch.spec_token_ids",
        "rejection_sampler",
        "requests",
        "uniform_decode_query_len",
    ),
}

_CLASSES = (Scheduler, SchedulerOutput, KVCacheGroupSpec, CompletionOutput)


def require(what: str, thing: Any, *, drafts: bool = False) -> None:
    """Look for all names of one of vLLM's objects or classes, those that only drafts need too.

    Raises ``ValueError`` for the first that is not there.
    """
    wanted = dict.fromkeys(_ALWAYS.get(what, ()), "")
    if drafts:
        less = ", or set rollout.speculation.mode=off: only drafts need it"
        wanted |= dict.fromkeys(_FOR_DRAFTS.get(what, ()), less)
    for name, less in wanted.items():
        if not _has(thing, name):
            raise ValueError(
                f"vLLM {vllm.__version__} has no {name} in its {what}: install vllm 0.32{less}"
            )


def require_classes(drafts: bool) -> None:
    """The same for what needs no engine, before there is one."""
    for each in _CLASSES:
        require(f"class {each.__name__}", each, drafts=drafts)
    require("request", Request("", [0], vllm.SamplingParams(), None), drafts=drafts)


def _has(thing: Any, name: str) -> bool:
    """A field without a default is no attribute of its class."""
    for part in name.split("."):
        if part in getattr(thing, "__dataclass_fields__", ()):
            return True
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True
