"""A job on the GPUs of this machine, with the values that it leaves out."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.job.plan.model_size import model_shape
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.cluster.machine_checks import free_memory_gb
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs.models import ModelShape, find_model
from rollpacker.sim.memory.fitting_settings import NONE, Changes, with_changes
from rollpacker.sim.memory.gpu_defaults import gpu_defaults
from rollpacker.sim.memory.needs import JobMachine

_SLOW = (
    "vLLM is not installed, so engine mini decodes, which takes about 25 ms a token whatever the "
    "model: pip install 'rollpacker[vllm]'"
)


def with_gpu_defaults(config: RunConfig, progress: Progress) -> RunConfig:
    """``config`` with the engine, type and memory that this machine's GPUs want, where the job
    leaves them out; the same on a CPU. Raises ``ValueError``."""
    if config.devices.emulate is not None or config.devices.kind == "cpu":
        return config
    machine = machine_here(config)
    changes = defaults_here(config, shape_of(config.model.path), machine) if machine.cuda else NONE
    if not changes:
        return config
    progress.note(f"on {machine.name}, of what the job leaves out: {in_words(changes)}")
    found = with_changes(config, changes)
    if found.engine.kind == "mini" and not _has_vllm():
        progress.note(_SLOW)
    return found


def defaults_here(config: RunConfig, shape: ModelShape, machine: JobMachine) -> Changes:
    """What it gets on this machine's GPUs for keys that it leaves out; nothing on a CPU."""
    if not machine.cuda:
        return NONE
    import torch

    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return gpu_defaults(config, shape, machine, vllm=_has_vllm(), bfloat16=bfloat16)


def _has_vllm() -> bool:
    return find_spec("vllm") is not None


def in_words(changes: Changes) -> str:
    """Changes as the command line takes them."""
    return " ".join(override(key, value) for key, value in changes.items())


def override(key: str, value: Any) -> str:
    """One of them."""
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {each}" for name, each in value.items())  # pyright: ignore
        return f"'{key}={{{inner}}}'"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def shape_of(path: str) -> ModelShape:
    """Of a folder or a known model; the hub is asked where it is neither. Raises ``ValueError``."""
    try:
        found = find_model(path)
    except ValueError:
        return model_shape(path)
    return model_shape(path) if found.frozen is None else found


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
