"""On which device of this machine each worker runs."""

from __future__ import annotations

import os
from pathlib import Path

from rollpacker.config import RunConfig, WorkersConfig


def worker_devices(config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Device and CPU cores of each worker. Raises ``ValueError`` when there are too few."""
    return place_workers(config.workers, _gpu_count() if config.workers.device != "cpu" else 0)


def gang_size(config: RunConfig, workers: int) -> int:
    """Workers of a replica. Raises ``ValueError`` where they do not divide."""
    size = config.trainer.members(workers)
    if workers % size:
        raise ValueError(
            f"trainer.shard={size}: {workers} workers do not divide into replicas of {size}: "
            "change it or workers.count"
        )
    return size


def place_workers(workers: WorkersConfig, gpus: int) -> list[tuple[str, tuple[int, ...]]]:
    """The same for a machine with so many GPUs."""
    if workers.device == "cuda" and gpus == 0:
        raise ValueError("workers.device is 'cuda' but no CUDA device was found")
    if gpus:
        most = gpus * workers.per_gpu
        count = workers.count or most
        if count > most:
            raise ValueError(
                f"workers.count is {count} but there are {gpus} CUDA devices with "
                f"workers.per_gpu={workers.per_gpu}: lower the one or raise the other"
            )
        return [(f"cuda:{rank // workers.per_gpu}", ()) for rank in range(count)]
    if workers.per_gpu > 1:
        raise ValueError(
            f"workers.per_gpu is {workers.per_gpu} but the run is on the CPU: use workers.count"
        )
    # Without affinity, as on macOS, workers share all cores.
    pins = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pins else range(os.cpu_count() or 1)
    count = workers.count or max(1, min(2, len(cores) // workers.threads))
    if not pins or not workers.pin or count * workers.threads > len(cores):
        return [("cpu", ())] * count
    size = workers.threads
    return [("cpu", tuple(cores[rank * size : (rank + 1) * size])) for rank in range(count)]


def _gpu_count() -> int:
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()
