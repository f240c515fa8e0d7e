"""The program of a job: what agents start on its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rollpacker.core.codec import says

MOST_STOP_S = 3600.0
MOST_RESTARTS = 100

_Text = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
"""No program can be given a null character."""


class JobProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What to start on the first rollout node of a job; again on another one when it moves."""

    command: Annotated[
        tuple[_Text, ...],
        says(
            "arguments, the program first. In each of them `{python}`, `{url}`, `{token_file}`, "
            "`{cafile}`, `{job}`, `{node}`, `{attempt}`, `{nodes}` (the job's, with commas "
            "between them) and `{rank}` (of this one) stand for what the agent knows.",
            min_length=1,
        ),
    ]
    members: Annotated[
        tuple[_Text, ...],
        says(
            "what to start on the job's other nodes, in the same way; empty for nothing. They are "
            "ended when the first one is over, which is ended when one of them fails."
        ),
    ] = ()
    folder: Annotated[_Text, says("where it starts; empty for the agent's own.")] = ""
    environment: Annotated[
        Mapping[Annotated[str, Meta(pattern=r"^[^=\x00]+$")], _Text],
        says("besides the agent's."),
    ] = msgspec.field(default_factory=dict[str, str])
    restarts: Annotated[
        int,
        says(
            "so often it is started again after it failed, without an iteration in between.",
            ge=0,
            le=MOST_RESTARTS,
        ),
    ] = 3
    stop_s: Annotated[
        float,
        says("seconds between SIGTERM and SIGKILL where it is to end.", ge=0, le=MOST_STOP_S),
    ] = 60.0
