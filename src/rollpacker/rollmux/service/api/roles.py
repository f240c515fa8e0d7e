"""Who somebody is: the names, roles and teams of bearer tokens (``http.routes`` says what each may
do), and a request that is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Role = Literal["read", "submit", "node", "operate"]
"""``read`` looks, ``submit`` has jobs, ``node`` is an agent and the jobs that it starts,
``operate`` may do all."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whose token a request carries.

    Args:
        team: of ``submit``: whose jobs it may touch; empty for everybody's.
    """

    name: str
    role: Role
    team: str = ""

    def is_one_of(self, roles: Collection[Role]) -> bool:
        """Whether the role is one of these; ``operate`` always is."""
        return self.role == "operate" or self.role in roles

    def may_touch(self, team: str) -> bool:
        """Whether the jobs of a team are its own."""
        return not self.team or self.team == team

    def __str__(self) -> str:
        return f"{self.name} ({self.role}{f', team {self.team}' if self.team else ''})"


OPERATOR: Final = Principal(name="operator", role="operate")
"""Who has the token that the daemon began with."""


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A request is refused and changed nothing.

    Args:
        status: of HTTP.
        error: one line: what is wrong, and which field.
        more: further fields of the answer.
    """

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.body: dict[str, Any] = {"error": error} | more
