"""What a judge needs in bytes and seconds, measured when it starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollpacker.policy.grading.judge_budget import JudgeModel
from rollpacker.reward.judge.streamed import StreamedModel

_PROBE_TOKENS = 512
_REPEATS = 3


def measure(model: StreamedModel, *, cached: bool) -> JudgeModel:
    """The numbers of ``JudgeBudget``, from a few hundred tokens in one layer and a layer's copy.

    Args:
        model: the judge.
        cached: whether it keeps keys and values of all layers (mode ``generate``).
    """
    limit = getattr(model.config, "max_position_embeddings", _PROBE_TOKENS)
    tokens = min(_PROBE_TOKENS, limit)
    ids = torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    model.keep(1)  # the first layer: its compute is timed without copies
    model.hidden(ids, layers=1)
    before = _allocated(model.device)
    seconds = _shortest(lambda: model.hidden(ids, layers=1), model.device)
    activations = (_peak(model.device) - before) / tokens
    if activations <= 0:
        activations = _activation_bytes(model)
    return JudgeModel(
        layers=model.layers,
        layer_bytes=model.store.layer_bytes,
        fixed_bytes=model.fixed_bytes,
        token_bytes=activations + (_cache_bytes(model) if cached else 0.0),
        token_seconds=seconds / tokens,
        copy_seconds=_shortest(model.store.copy_once, model.device),
    )


def free_bytes(model: StreamedModel, most: float | None) -> float:
    """Device memory that the judge may use: what is free, what it holds, at most ``most``."""
    held = model.store.held_bytes + model.fixed_bytes
    if model.device.type != "cuda":
        assert most is not None
        return most
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    free = torch.cuda.mem_get_info(model.device)[0] + unused + held
    return free if most is None else min(free, most)


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    seconds: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _activation_bytes(model: StreamedModel) -> float:
    """Of one layer: the residual stream, its norm and attention, the gated MLP."""
    config = model.config
    return (8 * config.hidden_size + 3 * config.intermediate_size) * model.dtype.itemsize


def _cache_bytes(model: StreamedModel) -> float:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * model.layers * config.num_key_value_heads * head * model.dtype.itemsize
