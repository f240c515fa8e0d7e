"""What a job gets on GPUs for keys that it leaves out: what fits by the doctor's arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

from rollpacker.config import Config, RunConfig, VllmEngineConfig
from rollpacker.policy.engines.device_split import turns
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory.estimate_memory import needs
from rollpacker.sim.memory.fitting_settings import Changes, with_changes
from rollpacker.sim.memory.needs import JobMachine

_SMALL_GPU = 25e9
"""Bytes up to which a GPU has no room for a thousand sequences."""
_BACKWARD = (
    *((size, twice) for twice in (False, True) for size in (16384, 8192, 4096)),
    *((size, twice) for size in (2048, 1024) for twice in (False, True)),
)
"""Tokens of a micro-batch, and whether its activations are computed twice: the fastest first."""
_SHARES = tuple(share / 100 for share in range(85, 5, -5))
_LEAST = 16
"""Responses of full length that an engine's cache is to hold."""
_TRAIN = ("micro_batch_tokens", "gradient_checkpointing")
_KEYS = (
    "model.dtype",
    "engine",
    "engine.max_running",
    "engine.gpu_memory",
    "engine.kv_tokens",
    "train.micro_batch_tokens",
    "train.gradient_checkpointing",
    "devices.turns",
)


def gpu_defaults(
    config: RunConfig, shape: ModelShape, machine: JobMachine, *, vllm: bool, bfloat16: bool
) -> Changes:
    """Values for keys that the job leaves out; memory keeps its usual ones where nothing fits.

    Args:
        config: as the user gave it.
        shape: its model's.
        machine: with GPUs.
        vllm: it is installed there, and runs the model.
        bfloat16: the GPUs compute in it.
    """
    unset = left_out(config)
    changes: dict[str, Any] = {}
    if bfloat16 and "model.dtype" in unset:
        changes["model.dtype"] = "bfloat16"
    if vllm and "engine" in unset and not config.deterministic:
        changes["engine"] = {"kind": "vllm"}
    if isinstance(with_changes(config, changes).engine, VllmEngineConfig):
        if "engine.max_running" in unset:
            changes["engine.max_running"] = 512 if machine.device_bytes < _SMALL_GPU else 1024
    else:
        unset -= {"engine.gpu_memory", "devices.turns"}
    return _fitting(config, shape, machine, changes, unset)


def left_out(config: RunConfig) -> set[str]:
    """Keys of these that the user has not set."""
    return {key for key in _KEYS if not _given(config, key)}


def _fitting(
    config: RunConfig,
    shape: ModelShape,
    machine: JobMachine,
    changes: Changes,
    unset: Collection[str],
) -> Changes:
    """The same with the first settings of memory that fit with room to spare, else with those that
    fit and have the largest cache."""
    rollout = config.rollout
    least = min(_LEAST, rollout.prompts_per_step * rollout.num_generations)
    tight: list[tuple[int, Changes]] = []
    for more in _settings(with_changes(config, changes), unset):
        tried = {**changes, **more}
        try:
            found = needs(with_changes(config, tried), shape, machine)
        except ValueError:  # devices do not divide: that is said where it is checked
            return changes
        if found.fits and not found.tight and found.sequences >= least:
            return tried
        if found.fits:
            tight.append((found.sequences, tried))
    return max(tight, key=lambda each: each[0], default=(0, changes))[1]


def _settings(config: RunConfig, unset: Collection[str]) -> Iterator[Changes]:
    """Settings of memory, the fastest first; a trainer leaves its device only where nothing else
    fits."""
    own = config.train.micro_batch_tokens, config.train.gradient_checkpointing
    size_free, twice_free = (f"train.{key}" in unset for key in _TRAIN)
    backward = dict.fromkeys(
        (size if size_free else own[0], twice if twice_free else own[1])
        for size, twice in _BACKWARD
    )
    measured = {"engine.gpu_memory", "engine.kv_tokens"} <= {*unset}
    both = "devices.turns" in unset and turns(config, gpus=True) == "engine"
    for leaves, chosen, share in product(
        (False, True)[: 1 + both], backward, _SHARES if measured else (None,)
    ):
        found: dict[str, Any] = {"devices.turns": "both"} if leaves else {}
        found |= {
            f"train.{key}": value
            for key, value, usual in zip(_TRAIN, chosen, own, strict=True)
            if value != usual
        }
        yield found if share is None else {**found, "engine.gpu_memory": share}


def _given(config: Config, key: str) -> bool:
    """Whether the user has set a dotted key."""
    node: Any = config
    for name in key.split("."):
        if name not in node.model_fields_set:
            return False
        node = getattr(node, name)
    return True
