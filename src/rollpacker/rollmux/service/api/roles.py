"""Names, roles and teams of bearer tokens (rights are in ``http.routes``), and refusals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Role = Literal["read", "submit", "node", "operate"]
"""``read`` looks, ``submit`` has jobs, ``node`` is for agents and their jobs, ``operate`` may do
all."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The holder of a request's token. A ``team`` restricts ``submit`` to that team's jobs."""

    name: str
    role: Role
    team: str = ""

    def is_one_of(self, roles: Collection[Role]) -> bool:
        """Whether the role is one of these, or ``operate``."""
        return self.role == "operate" or self.role in roles

    def may_touch(self, team: str) -> bool:
        return not self.team or self.team == team

    def __str__(self) -> str:
        return f"{self.name} ({self.role}{f', team {self.team}' if self.team else ''})"


OPERATOR: Final = Principal(name="operator", role="operate")  # holder of the daemon's first token


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A request is refused and changed nothing."""

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.body: dict[str, Any] = {"error": error} | more
