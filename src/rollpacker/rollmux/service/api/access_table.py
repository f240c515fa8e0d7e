"""Every route of the daemon: who may ask for it, and whose job it is about. There is no other list.

The router matches by this table and a route decides by its own entry: what has no entry is served
to nobody, and no path is read twice. A path has one spelling: names and numbers are written as they
are kept, and nothing in them needs an escape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollpacker.rollmux.model.inventory import NAME
from rollpacker.rollmux.service.api.roles import Role

_LOOK: Final[tuple[Role, ...]] = ("read", "submit", "node")
_JOBS: Final[tuple[Role, ...]] = ("submit", "node")
_AGENTS: Final[tuple[Role, ...]] = ("node",)
_SUBMITTERS: Final[tuple[Role, ...]] = ("submit",)
_OPERATORS: Final[tuple[Role, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What the table says of a route.

    Args:
        roles: that may ask for it, besides ``operate``; None for everybody, without a token.
        owner: what of the path says whose job it is about, or ``body``: a team's token is for that
            team's jobs. Empty where it is about no job of one team, or only looks.
        routine: jobs and agents ask for it all the time: the log of events has it.
    """

    roles: tuple[Role, ...] | None
    owner: Literal["", "job", "token", "body"] = ""
    routine: bool = False


_OPEN: Final = Access(roles=None, routine=True)
_VIEW: Final = Access(roles=_LOOK, routine=True)
_OF_JOB: Final = Access(roles=_JOBS, owner="job", routine=True)
_OF_PERMIT: Final = Access(roles=_JOBS, owner="token", routine=True)
_OF_AGENT: Final = Access(roles=_AGENTS, routine=True)
_OPERATE: Final = Access(roles=_OPERATORS)

ROUTES: Final[Mapping[str, Access]] = {
    "GET /": _OPEN,
    "GET /favicon.ico": _OPEN,
    "GET /assets/{part}": _OPEN,
    "GET /v1/health": _OPEN,
    "GET /v1/openapi.json": _VIEW,
    "GET /v1/status": _VIEW,
    "GET /v1/timeline": _VIEW,
    "GET /v1/metrics": _VIEW,
    "GET /metrics": _VIEW,
    "GET /v1/events": _VIEW,
    # With the environments of programs, where people put secrets.
    "GET /v1/journal": Access(roles=_OPERATORS, routine=True),
    "POST /v1/jobs": Access(roles=_SUBMITTERS, owner="body"),
    "GET /v1/jobs": _VIEW,
    "GET /v1/jobs/{job}": _VIEW,
    "POST /v1/jobs/{job}/permits": _OF_JOB,
    "POST /v1/jobs/{job}/tail": _OF_JOB,
    "POST /v1/jobs/{job}/moved": _OF_JOB,
    "POST /v1/jobs/{job}/end": Access(roles=_JOBS, owner="job"),
    "POST /v1/jobs/{job}/gate": _OF_AGENT,
    "GET /v1/jobs/{job}/gate": _OF_AGENT,
    "POST /v1/jobs/{job}/attempts/{number}/log": _OF_AGENT,
    "GET /v1/jobs/{job}/log": _VIEW,
    "POST /v1/permits/{token}/heartbeat": _OF_PERMIT,
    "POST /v1/permits/{token}/finish": _OF_PERMIT,
    "POST /v1/permits/{token}/abandon": _OF_PERMIT,
    "POST /v1/nodes": Access(roles=_AGENTS),
    "GET /v1/nodes/{node}": _VIEW,
    "POST /v1/nodes/{node}/heartbeat": _OF_AGENT,
    "POST /v1/nodes/{node}/failed": Access(roles=_AGENTS),
    "POST /v1/nodes/{node}/close": _OPERATE,
    "POST /v1/nodes/{node}/open": _OPERATE,
    "POST /v1/nodes/{node}/remove": _OPERATE,
    "POST /v1/drain": _OPERATE,
}

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
"""In the one way that a number of 64 bits is written."""
IDENTIFIERS: Final[Mapping[str, tuple[re.Pattern[str], Callable[[str], str | int]]]] = {
    "job": (NAME, str),
    "node": (NAME, str),
    "token": (_NUMBER, int),
    "number": (_NUMBER, int),
    "part": (re.compile(r"[a-z_]{1,32}\.[a-z]{2,4}"), str),
}
"""What may stand in a path, and how it is read."""


class Spelling:
    """How a route's path is written.

    Args:
        path: with identifiers in braces.
    """

    def __init__(self, path: str) -> None:
        parts = re.split(r"\{(\w+)\}", path)
        self._names = parts[1::2]
        whole = [re.escape(parts[0])]
        for name, text in zip(self._names, parts[2::2], strict=True):
            whole += [f"({IDENTIFIERS[name][0].pattern})", re.escape(text)]
        self._pattern = re.compile("".join(whole))

    def read(self, path: bytes) -> dict[str, Any] | None:
        """The identifiers in a path, just as it was sent; None where it is another one."""
        found = self._pattern.fullmatch(path.decode("latin-1"))
        if found is None:
            return None
        given = zip(self._names, found.groups(), strict=True)
        return {name: IDENTIFIERS[name][1](text) for name, text in given}
