"""Which settings make a job fit a machine, when those that are given do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from rollpacker.config import MiniEngineConfig, RunConfig, VllmEngineConfig, parse
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory.estimate_memory import needs
from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds

Changes = Mapping[str, Any]
"""Values by dotted keys."""

_SHARE = "engine.gpu_memory"
_SHARES = (0.5, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8)
"""Of a GPU, for vLLM: the trainer is not to be starved first."""
_LEAST = 16
"""Responses of full length that an engine's cache is to hold."""
_LORA_RANK = 16
_MOST_RUNNING = VllmEngineConfig(kind="vllm").max_running


def fitting(
    config: RunConfig, shape: ModelShape, machine: JobMachine
) -> tuple[Changes, MemoryNeeds] | None:
    """The first changes with which the job fits, and is not tight if that can be.

    Those that alter the least come first: of replicas that are spread those over the fewest
    devices, and of engines those of the fewest.
    """
    tight: tuple[Changes, MemoryNeeds] | None = None
    for changes in candidates(config, machine):
        try:
            found = needs(with_changes(config, changes), shape, _placed(changes, machine))
        except ValueError:  # devices, or heads, do not divide so
            continue
        if found.fits and not found.tight:
            return changes, found
        if found.fits and tight is None:
            tight = changes, found
    return tight


def nearest(
    config: RunConfig, shape: ModelShape, machine: JobMachine
) -> tuple[Changes, MemoryNeeds] | None:
    """Where nothing fits: the changes with which the job takes least, and room for a response if
    that can be. None where devices or heads divide with none of them."""
    found: list[tuple[Changes, MemoryNeeds]] = []
    for changes in candidates(config, machine):
        with contextlib.suppress(ValueError):
            changed = with_changes(config, changes)
            found.append((changes, needs(changed, shape, _placed(changes, machine))))
    return min(found, key=lambda each: (each[1].sequences < 1, each[1].total), default=None)


def candidates(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    """Changes to try, in order; adapters, with which less is trained, are the last."""
    none: Changes = {}
    for adapters in (none, {"model.lora_rank": _LORA_RANK}):
        if adapters and config.model.lora_rank:
            return
        yield from _of_this_engine(config, machine, adapters)
        engine = config.engine
        if isinstance(engine, MiniEngineConfig) and machine.cuda and not config.deterministic:
            yield from _with_vllm(config, machine, adapters, engine.max_running)


def _of_this_engine(config: RunConfig, machine: JobMachine, also: Changes) -> Iterator[Changes]:
    for more in _other_settings(config, machine):
        for layout in _layouts(config, machine):
            if changes := {**layout, **more, **also}:
                yield changes


def _with_vllm(
    config: RunConfig, machine: JobMachine, also: Changes, most: int
) -> Iterator[Changes]:
    """An engine that can lie on several devices, for at ``most`` as many sequences at a time."""
    own: Changes = {"kind": "vllm", **({"max_running": most} if most != _MOST_RUNNING else {})}
    try:
        changed = with_changes(config, {"engine": own})
    except ValueError:  # something else of the job is for another engine
        return
    none: Changes = {}
    for changes in (none, *_of_this_engine(changed, machine, none)):
        engine = {**own, **_below(changes, "engine.")}
        rest = {key: value for key, value in changes.items() if not key.startswith("engine.")}
        yield {**rest, **also, "engine": engine}


def _below(changes: Changes, section: str) -> Changes:
    return {
        key.removeprefix(section): value
        for key, value in changes.items()
        if key.startswith(section)
    }


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """``config`` with other values. Raises ``ValueError`` where they cannot be."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = cast(dict[str, Any], node[parent])
        node[leaf] = value
    return parse(tree, "the changed job")


def _layouts(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    """As it is, fewer devices on a GPU, engines and replicas over more and more devices."""
    yield {}
    if machine.on_device > 1 and config.trainer.kind == "local" and not config.devices.training:
        yield _fewer(config, machine)
    separate = config.devices.layout == "separate"
    training = config.devices.training if separate else machine.workers
    now = config.trainer.members(training)
    larger = list(_larger_engines(config, machine))
    for shard in range(now, training + 1):
        spread: Changes = {"trainer.kind": "fsdp", "trainer.shard": shard} if shard > now else {}
        if spread:
            yield spread
        yield from ({**spread, **engine} for engine in larger)


def _larger_engines(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    """vLLM over more devices, each with a smaller part of the weights."""
    if isinstance(config.engine, VllmEngineConfig):
        size = 2 * config.engine.tensor_parallel
        while size <= machine.workers:
            yield {"engine.tensor_parallel": size}
            size *= 2


def _fewer(config: RunConfig, machine: JobMachine) -> Changes:
    """Each GPU, or the CPU, is one device."""
    if not machine.cuda:
        return {"devices.per_node": 1}
    count = {"devices.per_node": 0} if config.devices.per_node > machine.devices else {}
    return {"devices.per_gpu": 1, **count}


def _other_settings(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    """What the update and the engine may do with less, alone and then together."""
    single: list[Changes] = []
    if not config.train.gradient_checkpointing:
        single.append({"train.gradient_checkpointing": True})
    engine = config.engine
    if machine.cuda and isinstance(engine, VllmEngineConfig):
        shares = [each for each in _SHARES if each != engine.gpu_memory]
        single += [{_SHARE: share} for share in shares]
    least = _LEAST * (config.rollout.max_completion_length or 0)
    if isinstance(engine, MiniEngineConfig) and least and not 0 < engine.kv_tokens <= least:
        single.append({"engine.kv_tokens": least})
    if config.rollout.planner != "off":  # its engines hold memory while they rest
        single.append({"rollout.planner": "off"})
    if machine.cuda and config.model.dtype == "float32":
        single.append({"model.dtype": "bfloat16"})
    yield {}
    yield from single
    together: dict[str, Any] = {}
    for each in single:
        together |= {key: value for key, value in each.items() if key not in together}
    yield together
    if len(together) > 1:
        yield from ({**together, **each} for each in single if _SHARE in each)


def _placed(changes: Changes, machine: JobMachine) -> JobMachine:
    """The machine with the changed job's workers."""
    if not {"devices.per_gpu", "devices.per_node"} & changes.keys():
        return machine
    count = min(machine.workers, machine.devices)
    return replace(machine, workers=count, on_device=1)
