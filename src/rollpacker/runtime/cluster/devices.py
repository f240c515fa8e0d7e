"""The devices of this machine for a run."""

from __future__ import annotations

import os
from pathlib import Path

from rollpacker.config import DevicesConfig, RunConfig

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Files of NVIDIA's driver: on Linux, and on Windows' Linux (WSL2)."""
Place = tuple[str, tuple[int, ...]]
"""A device and its CPU cores, empty for any."""


def worker_devices(config: RunConfig) -> list[Place]:
    """This machine's devices for a run. Raises ``ValueError`` if there are too few."""
    if config.devices.emulate is not None:
        return [("emulated", ())] * config.devices.per_node
    return place_devices(config.devices, _gpu_count() if config.devices.kind != "cpu" else 0)


def place_devices(devices: DevicesConfig, gpus: int) -> list[Place]:
    """The same for a machine with ``gpus`` GPUs."""
    if devices.kind == "cuda" and gpus == 0:
        raise ValueError("devices.kind is 'cuda' but no CUDA device was found")
    if gpus:
        most = gpus * devices.per_gpu
        count = devices.per_node or most
        if count > most:
            raise ValueError(
                f"devices.per_node is {count}, but there are {gpus} CUDA devices with "
                f"devices.per_gpu={devices.per_gpu}: lower the former or raise the latter"
            )
        return [(f"cuda:{rank // devices.per_gpu}", ()) for rank in range(count)]
    if devices.per_gpu > 1:
        raise ValueError(
            f"devices.per_gpu is {devices.per_gpu}, but the run is on CPUs: use devices.per_node"
        )
    # On systems without affinity, such as macOS, workers share all cores.
    pins = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pins else range(os.cpu_count() or 1)
    count = devices.per_node or max(1, min(2, len(cores) // devices.threads))
    if not pins or not devices.pin or count * devices.threads > len(cores):
        return [("cpu", ())] * count
    size = devices.threads
    return [("cpu", tuple(cores[rank * size : (rank + 1) * size])) for rank in range(count)]


def _gpu_count() -> int:
    """Count by the driver's management library, so that forked workers may still use CUDA."""
    if not any(Path(each).exists() for each in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()
