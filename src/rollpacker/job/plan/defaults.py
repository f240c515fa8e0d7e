"""The values that a job leaves out, by the size of its model and this machine's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollpacker.config import RunConfig
from rollpacker.config.base import ROUTED
from rollpacker.errors import first_line
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.cluster.machine_checks import free_memory_gb
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs.layers_of_config import EXPERTS, ConfigFields
from rollpacker.sim.costs.models import ModelShape, WeightCount, find_model
from rollpacker.sim.memory.needs import JobMachine, needs
from rollpacker.sim.memory.settings import (
    NONE,
    Changes,
    gpu_defaults,
    in_words,
    left_out,
    with_changes,
)
from rollpacker.train.model.loading import source
from rollpacker.train.model.lora import adapter_widths
from rollpacker.train.state.optimizer import default_learning_rate

_TOO_LARGE = (
    "the job does not fit by arithmetic: rollpacker doctor with its file names the keys that make "
    "it fit"
)
_SLOW = (
    "vLLM is not installed, so engine mini decodes, at about 25 ms a token for every model: "
    "pip install 'rollpacker[vllm]'"
)


def with_gpu_defaults(
    config: RunConfig, progress: Progress, found: VerifiedCheckpoint | None = None
) -> RunConfig:
    """Return ``config`` with engine, types and memory for this machine's GPUs, for keys that the
    job leaves out, or with those of the checkpoint ``found``. Raises ``ValueError``."""
    devices = config.devices
    elsewhere = devices.nodes > 1 or bool(config.cluster.address)
    if devices.emulate is not None or devices.kind == "cpu" or elsewhere:
        return config
    machine = machine_here(config)
    if not machine.cuda:
        return config
    if found is not None:
        return with_changes(config, _as_before(config, found.state["config"]))
    shape = shape_of(config.model.path)
    changes = defaults_here(config, shape, machine)
    if not changes:
        return config
    progress.note(f"on {machine.name}, for keys that the job leaves out: {in_words(changes)}")
    chosen = with_changes(config, changes)
    if chosen.engine.kind == "mini" and not _has_vllm():
        progress.note(_SLOW)
    with suppress(ValueError):  # devices that do not divide are reported when they are assigned
        if not needs(chosen, shape, machine).fits:
            progress.note(f"WARNING {_TOO_LARGE}")
    return chosen


def _as_before(config: RunConfig, saved: Mapping[str, Any]) -> Changes:
    """The run's former values of keys that the job leaves out. This machine might choose others."""
    keys = left_out(config)
    if "engine" in keys:
        keys = {key for key in keys if not key.startswith("engine.")}
    found: dict[str, Any] = {}
    for key in keys:
        node: Any = saved
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None  # another engine's
        if node is not None:
            found[key] = node
    return found


def defaults_here(config: RunConfig, shape: ModelShape, machine: JobMachine) -> Changes:
    """Values for this machine's GPUs of keys that the job leaves out. Empty on a CPU."""
    if not machine.cuda:
        return NONE
    import torch

    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return gpu_defaults(config, shape, machine, vllm=_has_vllm(), bfloat16=bfloat16)


def _has_vllm() -> bool:
    return find_spec("vllm") is not None


def shape_of(path: str) -> ModelShape:
    """The shape of a folder's, a known or a hub's model. Raises ``ValueError``."""
    with suppress(ValueError):
        found = find_model(path)
        if found.frozen is not None:
            return found
    return shape_of_config(source(path)[1], path)


def machine_here(config: RunConfig) -> JobMachine:
    """This machine, with the devices that the job has of it. Raises ``ValueError``."""
    places = [device for device, _ in worker_devices(config)]
    name, packed = "this machine's memory", 4
    if places[0] == "cpu":
        if config.model.dtype == "bfloat16":
            from rollpacker.engine.mini.cpu.lanes import HAS_BF16_DOT

            packed = 2 if HAS_BF16_DOT else 4
        free, devices = free_memory_gb() * 1024**3, 1
    else:
        import torch

        device = torch.cuda.get_device_properties(0)
        name, free, devices = device.name, float(device.total_memory), torch.cuda.device_count()
    return JobMachine(
        name=name,
        cuda=places[0] != "cpu",
        devices=devices,
        device_bytes=free,
        workers=config.devices.nodes * len(places),
        on_device=max(Counter(places).values()),
        packed=packed,
        nodes=config.devices.nodes,
    )


def with_learning_rate(
    config: RunConfig, found: VerifiedCheckpoint | None, progress: Progress
) -> RunConfig:
    """Return ``config`` with ``train.learning_rate``: as set, as in the checkpoint ``found``, or by
    the number of weights. Raises ``ValueError`` if there is no such model."""
    if config.train.learning_rate is not None:
        return config
    if found is not None:
        rate = found.state["config"]["train"]["learning_rate"]
    else:
        count, lora = count_model(config.model.path), config.model.lora_rank > 0
        rate = default_learning_rate(count.total, lora=lora)
        if config.devices.emulate is None:  # else nothing is trained
            how = " with LoRA" if lora else ""
            progress.note(f"train.learning_rate: {rate:g}, for {count.words}{how}")
    train = config.train.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"train": train})


def count_model(path: str) -> WeightCount:
    """Weights of a folder's or hub's model. Raises ``ValueError``."""
    return count_weights(source(path)[1], path)


def shape_of_config(config: Any, name: str) -> ModelShape:
    """The shape of a transformers configuration's text model. Raises ``ValueError`` in one line."""
    count, text = count_weights(config, name), config.get_text_config()
    frozen = 0 if text is config else _size(_built(config, name)) - count.total
    shape = ModelShape.from_config(text.to_dict(), name, count, frozen)
    return replace(shape, adapter_widths=adapter_widths(_built(text, name)))


def count_weights(config: Any, name: str) -> WeightCount:
    """Count the weights of a configuration's text model without memory for them. Experts are
    stacked tensors with one matrix for each. Raises ``ValueError`` in one line."""
    text = config.get_text_config()
    model = _built(text, name)
    fields = ConfigFields(text.to_dict(), name)
    count = fields.integer(*EXPERTS, default=0)
    total = _size(model)
    stacked = [w.numel() for w in model.parameters() if _stacked(w, count)]
    experts = sum(stacked)
    met = experts * fields.integer(*ROUTED) // count if experts else 0
    return WeightCount(total, total - experts + met, experts)


def _built(config: Any, name: str) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # models raise anything for sizes that do not fit
        raise ValueError(
            f"model.path={name}: transformers cannot build the model of its config.json: "
            f"{first_line(error)}"
        ) from error


def _size(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _stacked(weight: torch.Tensor, experts: int) -> bool:
    """Whether it has a matrix for each expert. A convolution has one row for each channel."""
    return weight.dim() == 3 and weight.shape[0] == experts > 0 and weight.shape[1] > 1
