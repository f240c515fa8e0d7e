"""Builds vLLM's engine, and undoes the build's effects on the process."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
import vllm
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.engine.base import Span, free_bytes
from rollpacker.engine.drafts import LONGEST_DRAFT
from rollpacker.engine.vllm import first_runner
from rollpacker.engine.vllm.drawing import VllmSpeculator
from rollpacker.errors import words_of

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The room that an engine needs, if it does not take all that is left of its GPU.

    ``tokens`` 0 asks for ``running`` longest sequences, as far as memory goes. A group
    (``kv_cache_spec``) holds layers of one kind. A sequence takes blocks for each group from one
    pool: mamba states a fixed number, others by tokens.
    """

    tokens: int = 0
    running: int


class Budgeted(Executor):
    """An executor that is asked for memory once its model is loaded, and has no KV cache yet."""

    budget: Budget | None = None

    def determine_available_memory(self) -> list[int]:
        found: list[int] = super().determine_available_memory()
        budget, config = self.budget, self.vllm_config
        if budget is None:
            return found
        (layers,) = self.get_kv_cache_specs()
        groups = get_kv_cache_groups(config, dict(layers))
        specs = [group.kv_cache_spec for group in groups]
        if budget.tokens:
            # One block is vLLM's own.
            config.cache_config.num_gpu_blocks_override = 1 + _blocks(specs, budget, config)
            return found
        wanted = 1 + budget.running * sum(_longest(spec, config) for spec in specs)
        return [min(size, wanted * max(map(_bytes, groups))) for size in found]


def _blocks(specs: Sequence[Any], budget: Budget, config: Any) -> int:
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    rows = [spec for spec in specs if spec not in states]
    partly = len(rows) > 1  # a window begins within a block
    return sum(budget.running * _longest(spec, config) for spec in states) + sum(
        max(1, budget.tokens // spec.block_size) + partly for spec in rows
    )


def _bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    several = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return several * spec.page_size_bytes


def _longest(spec: Any, config: Any) -> int:
    return -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)


def room(scheduler: Any, config: Any) -> int:
    """Tokens of all longest sequences that a built engine can hold together."""
    groups = [each.kv_cache_spec for each in scheduler.kv_cache_config.kv_cache_groups]
    block, context = config.cache_config.block_size, config.model_config.max_model_len
    usable = config.cache_config.num_gpu_blocks - 1  # one is vLLM's own
    whole = -(-context // block) * block
    return usable * whole // sum(_longest(spec, config) for spec in groups)


_HERE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""An engine never leaves its machine. These are read when groups are made, and reset for the
trainer's."""


def executor(span: Span, device: str, budget: Budget | None) -> type[Executor]:
    """vLLM's executor of one member, with its place passed in instead of read from variables. On a
    CPU, killed members leave shared memory under the name of their meeting's file.
    ``runtime.leftovers`` removes it."""

    class Alone(Budgeted, UniProcExecutor):
        pass

    index = None if device == "cpu" else torch.device(device).index
    place = (f"file://{span.meeting}", span.rank, span.rank if index is None else index)

    class Member(Budgeted, ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return place

    # Left to itself vLLM takes the first device.
    chosen = Alone if span.size == 1 and device in ("cpu", "cuda:0") else Member
    chosen.budget = budget
    return chosen


@contextmanager
def at_home(span: Span, device: str) -> Iterator[None]:
    """Build a member of an engine with groups that stay on this machine and agree on their
    names."""
    if span.size == 1:
        yield
        return
    # Group names count a process's earlier groups, of which members may have different numbers.
    parallel_state._group_name_counter.clear()
    if device == "cpu":
        # Otherwise torch compiles the lookup in a vocabulary that is split over members.
        torch.compiler.set_stance("force_eager")
    kept = {name: os.environ.get(name) for name in _HERE}
    os.environ.update(_HERE)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_BLOCK = 32  # Tokens of a block for a CPU's tiles. On a GPU vLLM's attention has its own.
_BATCHED = 8192
"""Tokens of a GPU's step. With vLLM's usual 2,048, prefill of many prompts takes four times as many
steps."""
_STALE = {
    "gpt_oss": "vLLM 0.32 keeps the old values of its experts and sinks when new weights come",
}
"""Families that sample with old values, as vLLM never replaces parts of their weights."""
_WIDER = ("cohere2",)
"""Families whose windows are one token longer in vLLM than in transformers, which trains here."""
_VERIFIED = {
    "method": "custom_class",
    "model": f"{first_runner.__name__}.{first_runner.NoProposer.__name__}",
    "num_speculative_tokens": LONGEST_DRAFT,
}
_UNASKED = 0.001
"""Share of a GPU that must be free when vLLM gets its KV cache's size. It then measures nothing, so
other processes' memory does not count as its own."""


class Counting(Scheduler):
    """vLLM's scheduler with counters and our drafts."""

    prefilled = preemptions = rows = 0
    ahead: VllmSpeculator | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Otherwise it drafts placeholders for each sequence with one token to run.
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
                request.spec_token_ids = []  # a draft that did not fit this step is void
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
    """An ``LLMEngine`` without weights, or this process's part of one. ``model`` is a folder.

    It ``verifies`` drafts (``Counting.ahead``) unless the model's layers keep a state, which cannot
    be rolled back. Raises ``ValueError`` for a model that vLLM cannot run here, or not beside a
    transformers model in this process (``alone``).
    """
    settings = _settings(model, config, device, sharers, span)
    gc.collect()  # now, as collecting an old engine later would destroy the new one's groups
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
    kind = transformers.AutoConfig.from_pretrained(args.model).model_type
    if kind in _STALE:
        raise ValueError(f"{kind}: {_STALE[kind]}")
    if kind.startswith("qwen3_5") and find_spec("torchvision") is None:
        raise ValueError(f"{kind}: vLLM's module for it needs torchvision, which is missing")
    model = args.create_model_config()
    if kind in _WIDER and model.hf_config.sliding_window:
        args.hf_overrides = {"sliding_window": model.hf_config.sliding_window - 1}
    if model.using_transformers_backend() and not alone:
        raise ValueError(
            f"vLLM runs {kind} by transformers' own classes, which it changes in this process, "
            "where the trainer uses them too: set engine.kind=mini, or use rollpacker train"
        )
    if model.is_hybrid and device == "cpu":
        # Its kernel keeps no states within a prompt, which a shared prefix would need.
        args.enable_prefix_caching = False
    return model


def _said(error: Exception) -> str:
    said = words_of(error) or type(error).__name__
    if isinstance(error, AttributeError | ImportError | KeyError | TypeError):
        return f"vLLM {vllm.__version__} beside transformers {transformers.__version__}: {said}"
    return said


def _settings(
    model: ModelConfig, config: VllmEngineConfig, device: str, sharers: int, span: Span
) -> dict[str, Any]:
    """vLLM's arguments. All members of an engine must get the same number of blocks."""
    budget = None
    if device == "cpu" or config.kv_tokens:
        budget = Budget(tokens=span.size * config.kv_tokens, running=config.max_running)
    settings: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        # The trainer sends the weights before the first step.
        "load_format": "dummy",
        # The model's context, or less if the KV cache cannot hold such a sequence.
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
        # vLLM's attention uses a CPU's AMX tiles, for which a process must ask Linux.
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
        settings["kv_cache_memory_bytes"] = 1  # blocks are given, so that vLLM measures nothing
    elif device == "cpu":
        settings["kv_cache_memory_bytes"] = max(1, free_bytes() // sharers // KV_SHARE)
    return settings


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restore global seeds and torch's number of threads, which a build changes, and hide warnings
    of deprecated names in the modules that it searches."""
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
    """Let vLLM search llvmlite's namespace, in which one object has no real ``vars``. On a CPU
    without Triton, vLLM calls ``vars(value).get("kernel")`` on every module's objects. llvmlite's
    library returns a function for any name."""
    with suppress(ImportError):
        from llvmlite.binding import ffi

        ffi.lib._fntab.setdefault("__dict__", {})
