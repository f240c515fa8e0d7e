"""Building vLLM's engine, and undoing what that does to the process."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.engine.vllm.sampling import Seeded

_BLOCK = 32


class Counting(Scheduler):
    """vLLM's scheduler, counted."""

    prefilled = preemptions = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        before = {r.request_id for r in self.running}
        out = super().schedule(*args, **kwargs)
        for key, count in out.num_scheduled_tokens.items():
            if key not in before or count > 1:
                # The last token of a response is decoded, not prefilled.
                request = self.requests[key]
                whole = request.num_computed_tokens >= request.num_tokens
                self.prefilled += count - (whole and request.num_output_tokens > 0)
        return out

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return super()._preempt_request(*args, **kwargs)


def build(model: ModelConfig, config: VllmEngineConfig, device: str, sharers: int) -> Any:
    """An ``LLMEngine`` on one device, without weights.

    Raises ``ValueError`` for a model that vLLM cannot run there.
    """
    settings: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        # The trainer has them, and gives them before the first step.
        "load_format": "dummy",
        "block_size": _BLOCK,
        "max_num_seqs": config.max_running,
        "distributed_executor_backend": "uni",
        "logits_processors": [Seeded],
        "scheduler_cls": Counting,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
    }
    if device == "cpu":
        _hide_llvmlite()
        blocks, size = _blocks(model, config, sharers)
        settings |= {
            "enforce_eager": True,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": blocks * size,
        }
    else:
        settings["gpu_memory_utilization"] = config.gpu_memory / sharers
        if config.kv_tokens:
            settings["num_gpu_blocks_override"] = max(1, config.kv_tokens // _BLOCK) + 1
    gc.collect()  # an engine that is gone takes the process's groups along as it is collected
    try:
        with _process_kept():
            return LLMEngine.from_engine_args(EngineArgs(**settings))
    except (ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"engine.kind=vllm cannot run {model.path} here: {said}") from error


def _blocks(model: ModelConfig, config: VllmEngineConfig, sharers: int) -> tuple[int, int]:
    """KV blocks on a CPU, one of them vLLM's own, and the bytes of one."""
    import psutil
    from transformers import AutoConfig

    shape: Any = AutoConfig.from_pretrained(model.path)
    heads = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    row = 2 * shape.num_hidden_layers * shape.num_key_value_heads * heads
    size = _BLOCK * row * (2 if model.dtype == "bfloat16" else 4)
    if config.kv_tokens:
        return max(1, config.kv_tokens // _BLOCK) + 1, size
    wanted = config.max_running * -(-shape.max_position_embeddings // _BLOCK)
    free = psutil.virtual_memory().available // sharers // KV_SHARE
    return max(1, min(wanted, free // size)) + 1, size


@contextmanager
def _process_kept() -> Iterator[None]:
    """Undo what a build does to the process: global seeds, and torch's number of threads nailed.

    It looks through all modules, deprecated names too, and says so.
    """
    threads = torch.set_num_threads
    kept = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.random.set_rng_state(kept[2])
        torch.set_num_threads = threads


def _hide_llvmlite() -> None:
    """Let vLLM look through llvmlite's namespace, of which one object has no real ``vars``.

    Building an engine on a CPU without Triton calls ``vars(value).get("kernel")`` on whatever any
    module holds, and the library that llvmlite wraps makes a function of any name it is asked for.
    """
    with suppress(ImportError):
        from llvmlite.binding import ffi

        ffi.lib._fntab.setdefault("__dict__", {})  # pyright: ignore[reportAttributeAccessIssue]
