"""Building vLLM's engine, and undoing what that does to the process."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.engine.base import Span, free_bytes
from rollpacker.engine.drafts import LONGEST_DRAFT
from rollpacker.engine.vllm import first_runner
from rollpacker.engine.vllm.drawing import VllmSpeculator
from rollpacker.engine.vllm.kv_blocks import Budget
from rollpacker.engine.vllm.spanning import at_home, executor
from rollpacker.errors import words_of

_BLOCK = 32
"""Of a CPU's tiles; on a GPU the attention that vLLM chooses has its own."""
_BATCHED = 8192
"""Tokens of a GPU's step: with vLLM's usual 2,048, prefill of many prompts takes four times the
steps."""
_STALE = {
    "gpt_oss": "vLLM 0.32 keeps the old values of its experts and sinks when new weights come",
}
"""Families that begin well, and sample with weights of which parts are never replaced."""
_WIDER = ("cohere2",)
"""Families whose windows vLLM makes one token longer than transformers does, which trains here."""
_VERIFIED = {
    "method": "custom_class",
    "model": f"{first_runner.__name__}.{first_runner.NoProposer.__name__}",
    "num_speculative_tokens": LONGEST_DRAFT,
}
_UNASKED = 0.001
"""Share of a GPU that has to be free before vLLM begins, where it is told its KV cache's size: it
then measures nothing, so what other processes take meanwhile does not count as its own."""


class Counting(Scheduler):
    """vLLM's scheduler, counted, and given drafts."""

    prefilled = preemptions = rows = 0
    ahead: VllmSpeculator | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Else it drafts placeholders for whoever comes with one token to run.
        self.num_spec_tokens = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.ahead is not None:
            self.ahead.hand_in()
        before = {r.request_id for r in self.running}
        out = super().schedule(*args, **kwargs)
        drafts, prefilled = out.scheduled_spec_decode_tokens, 0
        for key, scheduled in out.num_scheduled_tokens.items():
            count = scheduled - len(drafts.get(key, ()))
            if key not in before or count > 1:
                # The last token of a response is decoded, not prefilled.
                request = self.requests[key]
                whole = request.num_computed_tokens >= request.num_tokens
                prefilled += count - (whole and request.num_output_tokens > 0)
        self.prefilled += prefilled
        if not prefilled:
            self.rows += out.total_num_scheduled_tokens
        if self.ahead is not None:
            for request in self.running:
                request.spec_token_ids = []  # of one that has no place in this step
        return out

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return super()._preempt_request(*args, **kwargs)


def build(
    model: ModelConfig,
    config: VllmEngineConfig,
    device: str,
    sharers: int,
    span: Span,
    *,
    alone: bool = True,
    verifies: bool = True,
) -> Any:
    """An ``LLMEngine`` without weights, or this process's part of one; ``model`` is a folder.

    It ``verifies`` drafts (``Counting.ahead``) unless the model's layers keep a state, which takes
    no token back.

    Raises ``ValueError`` for a model that vLLM cannot run there, or not beside a model of
    transformers in this process (``alone``).
    """
    settings = _settings(model, config, device, sharers, span)
    gc.collect()  # an engine that is gone takes the process's groups along as it is collected
    try:
        with _process_kept(), at_home(span, device):
            args = EngineArgs(**settings)
            model_config = _check(args, device, alone)
            verifies = verifies and not model_config.has_inner_state
            if verifies:
                args.speculative_config = dict(_VERIFIED)
                args.worker_cls = f"{first_runner.__name__}.{first_runner.Verifying.__name__}"
            else:
                args.logits_processors = [first_runner.Seeded]
            return LLMEngine.from_engine_args(args)
    except Exception as error:
        on = f" with engine.tensor_parallel={span.size}" if span.size > 1 else ""
        raise ValueError(
            f"engine.kind=vllm{on} cannot run {model.path} here: {_said(error)}"
        ) from error


def _check(args: EngineArgs, device: str, alone: bool) -> Any:
    """Refuse what would run, and be wrong; the model as vLLM sees it."""
    kind = transformers.AutoConfig.from_pretrained(args.model).model_type
    if kind in _STALE:
        raise ValueError(f"{kind}: {_STALE[kind]}")
    if kind.startswith("qwen3_5") and find_spec("torchvision") is None:
        raise ValueError(f"{kind}: vLLM's module for it imports torchvision, which is not there")
    model = args.create_model_config()
    if kind in _WIDER and model.hf_config.sliding_window:
        args.hf_overrides = {"sliding_window": model.hf_config.sliding_window - 1}
    if model.using_transformers_backend() and not alone:
        raise ValueError(
            f"vLLM runs {kind} by transformers' own classes, which it changes in this process, "
            "where the trainer has them too: take engine.kind=mini, or rollpacker train"
        )
    if model.is_hybrid and device == "cpu":
        # Its kernel gives no states from the middle of a prompt, which those of others would use.
        args.enable_prefix_caching = False
    return model


def _said(error: Exception) -> str:
    """Also of what another version of transformers has no more."""
    said = words_of(error) or type(error).__name__
    if isinstance(error, AttributeError | ImportError | KeyError | TypeError):
        return f"vLLM {vllm.__version__} beside transformers {transformers.__version__}: {said}"
    return said


def _settings(
    model: ModelConfig, config: VllmEngineConfig, device: str, sharers: int, span: Span
) -> dict[str, Any]:
    """vLLM's arguments. All members of an engine must come to the same number of blocks."""
    budget = None
    if device == "cpu" or config.kv_tokens:
        budget = Budget(tokens=span.size * config.kv_tokens, running=config.max_running)
    settings: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        # The trainer has them, and gives them before the first step.
        "load_format": "dummy",
        # The context, or less where the KV cache has not as much room for one sequence.
        "max_model_len": -1,
        "max_num_seqs": config.max_running,
        "distributed_executor_backend": executor(span, device, budget),
        "tensor_parallel_size": span.size,
        "scheduler_cls": Counting,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
    }
    if device == "cpu":
        # Its attention uses the tiles of a CPU that has them, for which a process has to ask Linux.
        torch.cpu._init_amx()
        _hide_llvmlite()
        settings |= {"enforce_eager": True, "block_size": _BLOCK}
    else:
        settings |= {
            "max_num_batched_tokens": _BATCHED,
            "enable_sleep_mode": True,
            "gpu_memory_utilization": (
                _UNASKED if config.kv_tokens else config.gpu_memory / sharers
            ),
        }
    if config.kv_tokens:
        settings["kv_cache_memory_bytes"] = 1  # so that it measures nothing: blocks are given
    elif device == "cpu":
        settings["kv_cache_memory_bytes"] = max(1, free_bytes() // sharers // KV_SHARE)
    return settings


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

        ffi.lib._fntab.setdefault("__dict__", {})
