"""What ``rollpacker mux submit`` reads: a job's specification, or a run's configuration."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, cast

import yaml

from rollpacker.config import RunConfig
from rollpacker.config import load as load_run
from rollpacker.config.places import only_here
from rollpacker.core.codec import plain, read_record
from rollpacker.data.files import is_pattern, kind_of
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.api.bodies import NewJob
from rollpacker.rollmux.service.job.joining import job_id, job_spec

_MEMBER = (
    *("{python}", "-m", "rollpacker", "mux", "member", "{job}", "{attempt}", "{rank}"),
    *("--url={url}", "--token-file={token_file}", "--cafile={cafile}"),
)
"""What runs on the nodes where the driver is not."""
_OF_A_RUN = {"model", "data"}
"""Keys of every run's configuration, and of no specification."""


def read_submission(path: Path) -> dict[str, Any]:
    """The body of ``POST /v1/jobs``.

    A run's configuration stands for the job that ``rollpacker train`` would make of it, started by
    an agent in this folder. Raises ``ValueError``.
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
            raise ValueError(f"{path}: mux.{key} must be set: seconds of the phase at worst")
    data = [config.data.path] if isinstance(config.data.path, str) else config.data.path
    for key, place in (("model.path", config.model.path), *(("data.path", file) for file in data)):
        if _is_lacking(place):
            raise ValueError(
                f"{path}: {key}: there is no '{place}' in {os.getcwd()}, where its nodes would "
                "start it: submit it in the folder that has it, or write the whole path"
            )
    told = {"url": "{url}", "token_file": "{token_file}", "cafile": "{cafile}", "job": "{job}"}
    program = JobProgram(
        command=(
            *("{python}", "-m", "rollpacker", "train", str(path.resolve())),
            # Quoted: an override is YAML, to which nothing is no text, and 7 a number.
            *(f"mux.{key}='{value}'" for key, value in told.items()),
            *("mux.managed=true", "--resume", "auto"),
        ),
        members=_MEMBER if config.cluster.address == "mux" else (),
        folder=os.getcwd(),
        stop_s=2 * config.checkpoint.grace_s + 10.0,
    )
    return plain(job_spec(config, job_id(config))) | {"program": plain(program)}


def _is_lacking(place: str) -> bool:
    """Whether it can only be a file or folder of the one it starts in, and is not there."""
    # A whole path may be on the nodes alone: on their own disks, or in their user's home.
    if ":" in place or place.startswith(("/", "~")) or is_pattern(place):
        return False
    can_only_be = only_here(place) or bool(kind_of(Path(place)))
    return can_only_be and not Path(place).exists()


def _program(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """A command may be one line, as in a shell; it starts where it was submitted."""
    for key in ("command", "members"):
        if isinstance(line := told.get(key), str):
            try:
                told = told | {key: shlex.split(line)}
            except ValueError as error:
                raise ValueError(f"{path}: program.{key}: {error}") from error
    return {"folder": os.getcwd()} | told
