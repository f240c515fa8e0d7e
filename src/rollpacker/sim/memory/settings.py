"""Find settings that fit a machine: for a job that does not fit, and for unset keys on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, cast

from rollpacker.config import Config, MiniEngineConfig, RunConfig, VllmEngineConfig, parse
from rollpacker.policy.engines.device_split import turns
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds, needs

Changes = Mapping[str, Any]
NONE: Changes = {}
Layouts = Callable[[RunConfig, JobMachine], Iterator[Changes]]

_SHARE, _MICRO_BATCH = "engine.gpu_memory", "train.micro_batch_tokens"
_SHARES = (0.5, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8)
"""Shares of a GPU for vLLM. The first ones leave the trainer enough."""
_LEAST = 16  # responses of full length that an engine's cache should hold
_LORA_RANK = 16
_HELD = 16  # bytes per trained weight on all devices: float32 weight, sum and moments
_SMALL, _SMALLEST = 8192, 1024
"""Tokens of a micro-batch: the least that keeps a GPU busy, and the default."""
_MOST_RUNNING = VllmEngineConfig(kind="vllm").max_running


def fitting(
    config: RunConfig, shape: ModelShape, machine: JobMachine, also: Changes = NONE
) -> tuple[Changes, MemoryNeeds] | None:
    """Return the first changes with which the job fits, if possible without being tight. The
    smallest changes come first. Training results change only by ``also``."""
    there = machine.nodes * machine.devices * machine.device_bytes
    adapters = config.model.lora_rank or "model.lora_rank" in also
    if not adapters and _HELD * shape.parameters > there:
        return None
    small: tuple[Changes, MemoryNeeds] | None = None
    tight: tuple[Changes, MemoryNeeds] | None = None
    for changes in candidates(config, machine, also):
        for tried, found in _smaller(config, shape, machine, changes):
            if found.tight:
                tight = tight or (tried, found)
            elif found.fits and tried.get(_MICRO_BATCH, _SMALL) < _SMALL:
                small = small or (tried, found)
            elif found.fits:
                return tried, found
    return small or tight


def nearest(
    config: RunConfig, shape: ModelShape, machine: JobMachine
) -> tuple[Changes, MemoryNeeds] | None:
    """Return the changes with which the job takes least, if nothing fits. Changes with room for
    a response come first. None if devices or heads never divide."""
    found = (
        each
        for also in (NONE, *other_results(config, machine))
        for changes in candidates(config, machine, also)
        for each in _smaller(config, shape, machine, changes)
    )
    return min(found, key=lambda each: (each[1].sequences < 1, each[1].total), default=None)


def other_results(config: RunConfig, machine: JobMachine) -> list[Changes]:
    """Return changes that save memory but change the results: bfloat16, adapters, both."""
    narrow = machine.cuda and config.model.dtype == "float32"
    types = {"model.dtype": "bfloat16"} if narrow else {}
    adapters = {} if config.model.lora_rank else {"model.lora_rank": _LORA_RANK}
    both = [{**types, **adapters}] if types and adapters else []
    return [each for each in (types, adapters, *both) if each]


def _smaller(
    config: RunConfig, shape: ModelShape, machine: JobMachine, changes: Changes
) -> Iterator[tuple[Changes, MemoryNeeds]]:
    """Needs of the changed job, with its own and with the smallest micro-batches. The smallest
    are as long as a response. If they fit, larger ones come first."""
    try:
        changed, place = with_changes(config, changes), _placed(changes, machine)
        found = needs(changed, shape, place)
    except ValueError:  # devices, or heads, do not divide so
        return
    yield changes, found
    if found.fits and not found.tight:
        return
    tokens, least = [config.train.micro_batch_tokens], max(_SMALLEST, found.longest)
    while tokens[-1] > least:
        tokens.append(1 << (tokens[-1] - 1).bit_length() - 1)

    def with_tokens(count: int) -> tuple[Changes, MemoryNeeds]:
        train = changed.train.model_copy(update={"micro_batch_tokens": count})
        found = needs(changed.model_copy(update={"train": train}), shape, place)
        return {_MICRO_BATCH: count, **changes}, found

    smallest = with_tokens(tokens[-1])
    if smallest[1].fits:
        yield from map(with_tokens, tokens[1:-1])
    if len(tokens) > 1:
        yield smallest


def candidates(config: RunConfig, machine: JobMachine, also: Changes = NONE) -> Iterator[Changes]:
    """Yield changes to try, in order, each with ``also``."""
    engine = config.engine
    for layouts in (_layouts, _separate):
        yield from _of_this_engine(config, machine, also, layouts)
        if isinstance(engine, MiniEngineConfig) and machine.cuda and not config.deterministic:
            yield from _with_vllm(config, machine, also, layouts, engine.max_running)


def _of_this_engine(
    config: RunConfig, machine: JobMachine, also: Changes, layouts: Layouts
) -> Iterator[Changes]:
    for more in _other_settings(config, machine):
        for layout in layouts(config, machine):
            yield {**layout, **more, **also}


def _with_vllm(
    config: RunConfig, machine: JobMachine, also: Changes, layouts: Layouts, most: int
) -> Iterator[Changes]:
    own: Changes = {"kind": "vllm", **({"max_running": most} if most != _MOST_RUNNING else {})}
    try:
        changed = with_changes(config, {"engine": own})
    except ValueError:  # something else of the job is for another engine
        return
    for changes in _of_this_engine(changed, machine, NONE, layouts):
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
    """Return ``config`` with other values. Raises ``ValueError`` if they are invalid."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = cast(dict[str, Any], node[parent])
        node[leaf] = deepcopy(value)  # a section that another key then changes
    return parse(tree, "the changed job")


def in_words(changes: Changes) -> str:
    """Return changes as the command line takes them."""
    return " ".join(_override(key, value) for key, value in changes.items())


def _override(key: str, value: Any) -> str:
    if isinstance(value, dict):
        section = cast(dict[str, Any], value)
        inner = ", ".join(f"{name}: {each}" for name, each in section.items())
        return f"'{key}={{{inner}}}'"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _layouts(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    yield {}
    if machine.on_device > 1 and config.trainer.kind == "local" and not config.devices.training:
        yield _fewer(config, machine)
    separate = config.devices.layout == "separate"
    training = config.devices.training if separate else machine.workers
    now = config.trainer.members(training)
    larger = list(_larger_engines(config, machine))
    for shard in (each for each in range(now, training + 1) if training % each == 0):
        spread: Changes = {"trainer.kind": "fsdp", "trainer.shard": shard} if shard > now else {}
        if spread:
            yield spread
        yield from ({**spread, **engine} for engine in larger)


def _separate(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    if not machine.cuda or config.devices.layout == "separate" or machine.on_device > 1:
        return
    decoding = machine.workers // 2
    while decoding:
        split = {"devices.layout": "separate", "devices.training": machine.workers - decoding}
        spread: Changes = {**split, "trainer.kind": "fsdp", "trainer.shard": 0}
        yield spread
        if isinstance(config.engine, VllmEngineConfig):
            sizes = (1 << power for power in range(decoding.bit_length()))
            yield from ({**spread, "engine.tensor_parallel": size} for size in sizes)
        decoding //= 2


def _larger_engines(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
    if isinstance(config.engine, VllmEngineConfig):
        size = 2 * config.engine.tensor_parallel
        while size <= machine.workers // machine.nodes:
            yield {"engine.tensor_parallel": size}
            size *= 2


def _fewer(config: RunConfig, machine: JobMachine) -> Changes:
    if not machine.cuda:
        return {"devices.per_node": 1}
    count = {"devices.per_node": 0} if config.devices.per_node > machine.devices else {}
    return {"devices.per_gpu": 1, **count}


def _other_settings(config: RunConfig, machine: JobMachine) -> Iterator[Changes]:
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
    if turns(config, gpus=machine.cuda) == "engine":
        single.append({"devices.turns": "both"})
    if config.rollout.planner != "off":  # its engines hold memory while they rest
        single.append({"rollout.planner": "off"})
    yield {}
    yield from single
    together: dict[str, Any] = {}
    for each in single:
        together |= {key: value for key, value in each.items() if key not in together}
    yield together
    if len(together) > 1:
        yield from ({**together, **each} for each in single if _SHARE in each)


def _placed(changes: Changes, machine: JobMachine) -> JobMachine:
    if not {"devices.per_gpu", "devices.per_node"} & changes.keys():
        return machine
    count = min(machine.workers // machine.nodes, machine.devices)
    return replace(machine, workers=machine.nodes * count, on_device=1)


# --- Keys that a job on GPUs leaves out

_SMALL_GPU = 25e9  # A GPU with fewer bytes has no room for a thousand sequences
_BACKWARD = (
    *((size, twice) for twice in (False, True) for size in (16384, 8192, 4096)),
    *((size, twice) for size in (2048, 1024) for twice in (False, True)),
)
"""Tokens of a micro-batch, and whether activations are recomputed. The fastest first."""
_KV_SHARES = tuple(share / 100 for share in range(85, 5, -5))
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
    """Return values for unset keys. Keys of memory keep their defaults if nothing fits.
    ``vllm``: it is installed there, and runs the model. ``bfloat16``: the GPUs compute in it."""
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
    """Return the keys of these that the user has not set."""
    return {key for key in _KEYS if not _given(config, key)}


def _fitting(
    config: RunConfig,
    shape: ModelShape,
    machine: JobMachine,
    changes: Changes,
    unset: Collection[str],
) -> Changes:
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
    own = config.train.micro_batch_tokens, config.train.gradient_checkpointing
    size_free, twice_free = (f"train.{key}" in unset for key in _TRAIN)
    backward = dict.fromkeys(
        (size if size_free else own[0], twice if twice_free else own[1])
        for size, twice in _BACKWARD
    )
    measured = {"engine.gpu_memory", "engine.kv_tokens"} <= {*unset}
    both = "devices.turns" in unset and turns(config, gpus=True) == "engine"
    for leaves, chosen, share in product(
        (False, True)[: 1 + both], backward, _KV_SHARES if measured else (None,)
    ):
        found: dict[str, Any] = {"devices.turns": "both"} if leaves else {}
        found |= {
            f"train.{key}": value
            for key, value, usual in zip(_TRAIN, chosen, own, strict=True)
            if value != usual
        }
        yield found if share is None else {**found, "engine.gpu_memory": share}


def _given(config: Config, key: str) -> bool:
    node: Any = config
    for name in key.split("."):
        if name not in node.model_fields_set:
            return False
        node = getattr(node, name)
    return True
