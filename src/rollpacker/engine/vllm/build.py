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
from rollpacker.engine.base import Span
from rollpacker.engine.host_memory import free_bytes
from rollpacker.engine.vllm.sampling import Seeded
from rollpacker.engine.vllm.spanning import at_home, executor
from rollpacker.errors import words_of

_BLOCK = 32
_UNASKED = 0.001
"""Share of a GPU that has to be free before vLLM begins, where it is told its KV cache's size: it
then measures nothing, so what other processes take meanwhile does not count as its own."""


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


def build(
    model: ModelConfig, config: VllmEngineConfig, device: str, sharers: int, span: Span
) -> Any:
    """An ``LLMEngine`` without weights, or this process's part of one; ``model`` is a folder.

    Raises ``ValueError`` for a model that vLLM cannot run there.
    """
    settings = _settings(model, config, device, sharers, span)
    gc.collect()  # an engine that is gone takes the process's groups along as it is collected
    try:
        with _process_kept(), at_home(span, device):
            return LLMEngine.from_engine_args(EngineArgs(**settings))
    except (ValueError, RuntimeError, AssertionError) as error:
        said = words_of(error)
        on = f" with engine.tensor_parallel={span.size}" if span.size > 1 else ""
        raise ValueError(f"engine.kind=vllm{on} cannot run {model.path} here: {said}") from error


def _settings(
    model: ModelConfig, config: VllmEngineConfig, device: str, sharers: int, span: Span
) -> dict[str, Any]:
    """vLLM's arguments. All members of an engine must come to the same number of blocks."""
    settings: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        # The trainer has them, and gives them before the first step.
        "load_format": "dummy",
        # The context, or less where the KV cache has not as much room for one sequence.
        "max_model_len": -1,
        "block_size": _BLOCK,
        "max_num_seqs": config.max_running,
        # Left to itself it takes the first device.
        "distributed_executor_backend": (
            "uni" if span.size == 1 and device in ("cpu", "cuda:0") else executor(span, device)
        ),
        "tensor_parallel_size": span.size,
        "logits_processors": [Seeded],
        "scheduler_cls": Counting,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
    }
    given = _given(config, span.size)
    if device == "cpu":
        _hide_llvmlite()
        settings["enforce_eager"] = True
    else:
        settings |= {
            "enable_sleep_mode": True,
            "gpu_memory_utilization": _UNASKED if given else config.gpu_memory / sharers,
        }
    if device == "cpu" or given:
        size = _block_bytes(model, span.size)
        blocks = given or _fitting_blocks(model, config, sharers, size)
        settings["kv_cache_memory_bytes"] = (blocks + 1) * size  # one of them is vLLM's own
    if given:
        settings["num_gpu_blocks_override"] = given + 1
    return settings


def _given(config: VllmEngineConfig, devices: int) -> int:
    """KV blocks of the budget that is configured, 0 without."""
    return max(1, devices * config.kv_tokens // _BLOCK) if config.kv_tokens else 0


def _shape(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model.path)


def _block_bytes(model: ModelConfig, devices: int) -> int:
    """Bytes of a KV block on each of the devices that share the heads."""
    shape = _shape(model)
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    heads = max(1, shape.num_key_value_heads // devices)
    row = 2 * shape.num_hidden_layers * heads * width
    return _BLOCK * row * (2 if model.dtype == "bfloat16" else 4)


def _fitting_blocks(
    model: ModelConfig, config: VllmEngineConfig, sharers: int, block_bytes: int
) -> int:
    """KV blocks on a CPU when no budget is given; members take the least of what they found."""
    wanted = config.max_running * -(-_shape(model).max_position_embeddings // _BLOCK)
    free = free_bytes() // sharers // KV_SHARE
    return max(1, min(wanted, free // block_bytes))


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
