"""The program of a job: what agents start on its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_STOP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgram:
    """What to start on the first rollout node of a job; again on another one when it moves.

    Args:
        command: arguments, the program first. In each of them ``{python}``, ``{url}``,
            ``{token_file}``, ``{cafile}``, ``{job}``, ``{node}``, ``{attempt}``, ``{nodes}`` (the
            job's, with commas between them) and ``{rank}`` (of this one) stand for what the agent
            knows.
        members: what to start on the job's other nodes, in the same way; empty for nothing. They
            are ended when the first one is over, which is ended when one of them fails.
        folder: where it starts; empty for the agent's own.
        environment: besides the agent's.
        restarts: so often it is started again after it failed, without an iteration in between.
        stop_s: seconds between SIGTERM and SIGKILL where it is to end.
    """

    command: tuple[str, ...]
    members: tuple[str, ...] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    restarts: int = 3
    stop_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on what cannot be started."""
        if not self.command or not self.command[0]:
            raise ValueError("program: command must not be empty")
        texts = (
            *self.command,
            *self.members,
            self.folder,
            *self.environment,
            *self.environment.values(),
        )
        if any("\0" in text for text in texts):
            raise ValueError("program: no text of it may hold a null character")
        if any(not name or "=" in name for name in self.environment):
            raise ValueError("program: the names of environment must not be empty or hold '='")
        if self.restarts < 0:
            raise ValueError("program: restarts must be 0 or more")
        if not 0 <= self.stop_s <= MOST_STOP_S:
            raise ValueError(f"program: stop_s must be 0 to {MOST_STOP_S:g} seconds")
