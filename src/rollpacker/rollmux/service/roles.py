"""Who may ask for what: the names, roles and teams of bearer tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

Role = Literal["read", "submit", "node", "operate"]
"""``read`` looks, ``submit`` has jobs, ``node`` is an agent and the jobs that it starts,
``operate`` may do all."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

_JOBS = re.compile(r"/v1/(jobs/[^/]+/(permits|tail|moved|end)|permits/.*)")
_SUBMIT = re.compile(r"/v1/jobs")
_GATE = r"jobs/[^/]+/gate"
_NODES = re.compile(rf"/v1/(nodes|nodes/[^/]+/(heartbeat|failed)|jobs/[^/]+/attempts/.*|{_GATE})")
_SECRET = re.compile(rf"/v1/(journal|{_GATE})")
"""The environments of programs, where people put secrets, and the keys of running jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whose token a request carries.

    Args:
        team: of ``submit``: whose jobs it may touch; empty for everybody's.
    """

    name: str
    role: Role
    team: str = ""

    def may(self, method: str, path: str) -> bool:
        """Whether the role suffices for a request, whosever job it is about."""
        if self.role == "operate":
            return True
        if method in ("GET", "HEAD") and not _SECRET.fullmatch(path):
            return True
        if self.role == "submit":
            return bool(_SUBMIT.fullmatch(path) or _JOBS.fullmatch(path))
        return self.role == "node" and bool(_NODES.fullmatch(path) or _JOBS.fullmatch(path))

    def may_touch(self, team: str) -> bool:
        """Whether the jobs of a team are its own."""
        return not self.team or self.team == team

    def __str__(self) -> str:
        return f"{self.name} ({self.role}{f', team {self.team}' if self.team else ''})"


OPERATOR: Final = Principal(name="operator", role="operate")
"""Who has the token that the daemon began with."""
