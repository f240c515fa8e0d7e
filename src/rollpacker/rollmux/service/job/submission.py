"""A run as a job of the daemon: its specification, its submission, and attaching to it again."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml
from msgspec.structs import replace

from rollpacker.config import MuxConfig, RunConfig
from rollpacker.config import load as load_run
from rollpacker.config.base import only_here
from rollpacker.core.codec import plain, read_record
from rollpacker.data.read import is_pattern, kind_of
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.api.bodies import NewJob
from rollpacker.rollmux.service.client.client import MuxClient, MuxError, UnreachableError
from rollpacker.rollmux.service.client.phase import patiently
from rollpacker.runtime.record.checkpoint import newest_step

_NAME = 48
_PATIENCE_S = 5.0


def job_id(config: RunConfig) -> str:
    """``mux.job``, or a name that every start of the run in this folder shares."""
    folder = Path(config.output).resolve()
    # Shortened: the daemon takes 64 characters, and NAME.2 must fit too.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name).lstrip("._-")[:_NAME] or "run"
    return config.mux.job or f"{name}-{zlib.crc32(str(folder).encode()):08x}"


def job_spec(config: RunConfig, name: str) -> JobSpec:
    """The specification of a run as a job."""
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
    """Steps after the newest checkpoint, as an estimate (None for a run limited by epochs)."""
    if not config.steps:
        return None
    return max(config.steps - max(newest_step(Path(config.output)), 0), 1)


def _gangs(config: RunConfig) -> tuple[int, int]:
    devices = config.devices
    if devices.layout != "separate" or devices.nodes == 1:
        return devices.nodes, devices.nodes
    train = math.ceil(devices.training / devices.per_node)
    return devices.nodes - train, train


def _node_gpus(config: RunConfig) -> int:
    devices = config.devices
    if devices.kind != "cuda" or devices.emulate is not None:
        return 1
    return max(math.ceil(devices.per_node / devices.per_gpu), 1)


def connect(mux: MuxConfig) -> MuxClient:
    """A client with short patience. Raises ``ValueError`` on wrong settings."""
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
    """Submit the job as soon as the daemon answers. Returns the job's name.

    A live job with this name and owner is an earlier start of the same run, and is taken over.
    After an ended job come ``NAME.2``, ``NAME.3``, ... Raises ``ValueError`` if another run has the
    name.
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
                    f"mux.job={name}: another run has a live job of this name, so choose another"
                ) from None
        return name


def attach(
    client: MuxClient,
    spec: JobSpec,
    stopped: Callable[[], bool] = lambda: False,
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> str:
    """Continue a submitted job. Returns its name. Raises ``ValueError`` if it is over."""
    known = patiently(partial(client.job, spec.id), stopped, away)
    if known["state"] in ("ending", "ended"):
        raise ValueError(f"mux.job={spec.id}: the job is over, so nothing is started in its name")
    return spec.id


_MEMBER = (
    *("{python}", "-m", "rollpacker", "mux", "member", "{job}", "{attempt}", "{rank}"),
    *("--url={url}", "--token-file={token_file}", "--cafile={cafile}"),
)
"""Command for the nodes without the driver."""
_OF_A_RUN = {"model", "data"}  # keys that only run configurations have


def read_submission(path: Path) -> dict[str, Any]:
    """The body of ``POST /v1/jobs`` from a file. Raises ``ValueError``.

    A run's configuration becomes a job in which an agent runs ``rollpacker train`` in this folder.
    """
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: neither JSON nor YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected keys and values, found {type(found).__name__}")
    found = cast(dict[str, Any], found)
    if found.keys() & _OF_A_RUN:
        return _of_run(path, load_run(path))
    if isinstance(program := found.get("program"), dict):
        found["program"] = _program(path, cast(dict[str, Any], program))
    try:
        read_record(found, NewJob)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def _of_run(path: Path, config: RunConfig) -> dict[str, Any]:
    for key in ("worst_rollout_s", "worst_train_s"):
        if not getattr(config.mux, key):
            raise ValueError(f"{path}: mux.{key} must be set to the longest seconds of the phase")
    data = [config.data.path] if isinstance(config.data.path, str) else config.data.path
    for key, place in (("model.path", config.model.path), *(("data.path", file) for file in data)):
        if _is_lacking(place):
            raise ValueError(
                f"{path}: {key}: there is no '{place}' in {os.getcwd()}, where the job's nodes "
                "start it: submit it in the folder that has it, or give an absolute path"
            )
    told = {"url": "{url}", "token_file": "{token_file}", "cafile": "{cafile}", "job": "{job}"}
    program = JobProgram(
        command=(
            *("{python}", "-m", "rollpacker", "train", str(path.resolve())),
            # Quoted, since overrides are YAML: an empty value or 7 would not be text.
            *(f"mux.{key}='{value}'" for key, value in told.items()),
            *("mux.managed=true", "--resume", "auto"),
        ),
        members=_MEMBER if config.cluster.address == "mux" else (),
        folder=os.getcwd(),
        stop_s=2 * config.checkpoint.grace_s + 10.0,
    )
    return plain(job_spec(config, job_id(config))) | {"program": plain(program)}


def _is_lacking(place: str) -> bool:
    """Whether a path must be relative to this folder, and does not exist."""
    # Absolute paths may exist on the nodes only: on their own disks, or in their user's home.
    if ":" in place or place.startswith(("/", "~")) or is_pattern(place):
        return False
    can_only_be = only_here(place) or bool(kind_of(Path(place)))
    return can_only_be and not Path(place).exists()


def _program(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Split commands given as one line, as a shell does, and set the folder of submission."""
    for key in ("command", "members"):
        if isinstance(line := told.get(key), str):
            try:
                told = told | {key: shlex.split(line)}
            except ValueError as error:
                raise ValueError(f"{path}: program.{key}: {error}") from error
    return {"folder": os.getcwd()} | told
