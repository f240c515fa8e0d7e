"""A ``rollpacker train`` job among the daemon's: its name, what the daemon is told, its start."""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from rollpacker.config import MuxConfig, RunConfig
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.link import MuxError, UnreachableError
from rollpacker.rollmux.service.client.phase_lease import patiently
from rollpacker.runtime.record.checkpoint import newest_step

_NAME = 48
_PATIENCE_S = 5.0


def job_id(config: RunConfig) -> str:
    """``mux.job``, or a name that every start of the run in this folder shares."""
    folder = Path(config.output).resolve()
    # Cut: the daemon takes 64 characters, and NAME.2 has to fit too.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name).lstrip("._-")[:_NAME] or "run"
    return config.mux.job or f"{name}-{zlib.crc32(str(folder).encode()):08x}"


def job_spec(config: RunConfig, name: str) -> JobSpec:
    """What the scheduler is told of the run."""
    mux = config.mux
    rollout_nodes, train_nodes = _gangs(config)
    return JobSpec(
        id=name,
        rollout_nodes=rollout_nodes,
        train_nodes=train_nodes,
        worst_rollout_s=mux.worst_rollout_s,
        worst_train_s=mux.worst_train_s,
        slo=mux.slo,
        expected_iterations=_steps_to_come(config),
        team=mux.team,
        priority=mux.priority,
        rollout_memory_gb=mux.rollout_memory_gb,
        train_memory_gb=mux.train_memory_gb,
        node_devices=_node_gpus(config),
        owner=hashlib.sha256(str(Path(config.output).resolve()).encode()).hexdigest()[:16],
    )


def _steps_to_come(config: RunConfig) -> int | None:
    """Those that are left after the newest checkpoint; None for a run that goes by epochs.

    Not exact: what comes after a checkpoint is done again by a run that is started again.
    """
    if not config.steps:
        return None
    return max(config.steps - max(newest_step(Path(config.output)), 0), 1)


def _gangs(config: RunConfig) -> tuple[int, int]:
    """Nodes of rollouts and of training: the same ones, or some each (``devices.layout``)."""
    devices = config.devices
    if devices.layout != "separate" or devices.nodes == 1:
        return devices.nodes, devices.nodes
    train = math.ceil(devices.training / devices.per_node)
    return devices.nodes - train, train


def _node_gpus(config: RunConfig) -> int:
    """GPUs that each node must have, where the run says that it decodes and trains on GPUs."""
    devices = config.devices
    if devices.kind != "cuda" or devices.emulate is not None:
        return 1
    return max(math.ceil(devices.per_node / devices.per_gpu), 1)


def connect(mux: MuxConfig) -> MuxClient:
    """A client whose requests give up soon. Raises ``ValueError`` on wrong settings."""
    for key in ("token_file", "worst_rollout_s", "worst_train_s"):
        if not getattr(mux, key):
            raise ValueError(f"mux.url is set, so mux.{key} must be set too")
    return MuxClient(mux.url, mux.token_file, cafile=mux.cafile, patience_s=_PATIENCE_S)


def register(
    client: MuxClient,
    spec: JobSpec,
    stopped: Callable[[], bool] = lambda: False,
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> str:
    """Submit the job, when the daemon is there; returns the name that it got.

    A live job of this name and owner is an earlier start of the same run (the run's folder has a
    lock), and is taken over where it was. One that has ended is followed by ``NAME.2``,
    ``NAME.3``, ... Raises ``ValueError`` where it is another run's.
    """
    number = 1
    while True:
        name = spec.id if number == 1 else f"{spec.id}.{number}"
        try:
            patiently(partial(client.submit, replace(spec, id=name)), stopped, away)
        except MuxError as error:
            if error.code != "exists":
                raise
            try:
                known = patiently(partial(client.job, name), stopped, away)
            except MuxError:
                raise error from None
            if known["state"] in ("ending", "ended"):
                number += 1
                continue
            if known["spec"]["owner"] != spec.owner:
                raise ValueError(
                    f"mux.job={name}: another run has a live job of this name; choose another"
                ) from None
        return name


def attach(
    client: MuxClient,
    spec: JobSpec,
    stopped: Callable[[], bool] = lambda: False,
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> str:
    """Go on with a job that was submitted; its name. Raises ``ValueError`` where it is over."""
    known = patiently(partial(client.job, spec.id), stopped, away)
    if known["state"] in ("ending", "ended"):
        raise ValueError(f"mux.job={spec.id}: the job is over, so nothing is started in its name")
    return spec.id
