"""The program that agents start on a job's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rollpacker.core.codec import says

MOST_STOP_S = 3600.0
MOST_RESTARTS = 100

_Text = Annotated[str, Meta(pattern=r"^[^\x00]*$")]  # a program cannot receive a null character


class JobProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The program for the first rollout node of a job. It restarts when the job moves."""

    command: Annotated[
        tuple[_Text, ...],
        says(
            "arguments, the program first. The agent fills in `{python}`, `{url}`, "
            "`{token_file}`, `{cafile}`, `{job}`, `{node}`, `{attempt}`, `{nodes}` (the job's, "
            "separated by commas) and `{rank}` (of this node).",
            min_length=1,
        ),
    ]
    members: Annotated[
        tuple[_Text, ...],
        says(
            "the same for the job's other nodes (empty for nothing). They end with the first "
            "program, which ends if one of them fails."
        ),
    ] = ()
    folder: Annotated[_Text, says("working directory (empty for the agent's own).")] = ""
    environment: Annotated[
        Mapping[Annotated[str, Meta(pattern=r"^[^=\x00]+$")], _Text],
        says("variables besides the agent's."),
    ] = msgspec.field(default_factory=dict[str, str])
    restarts: Annotated[
        int,
        says(
            "most restarts after failures without an iteration in between.",
            ge=0,
            le=MOST_RESTARTS,
        ),
    ] = 3
    stop_s: Annotated[
        float,
        says("seconds between SIGTERM and SIGKILL.", ge=0, le=MOST_STOP_S),
    ] = 60.0
