"""Bearer tokens besides the operator's: the daemon keeps a file of their hashes."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rollpacker.core.codec import dumps, load, loads
from rollpacker.rollmux.service.api.roles import OPERATOR, Principal, Role
from rollpacker.rollmux.service.http.token_file import is_authorized

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
FILE = "tokens.json"
"""In the daemon's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What is kept of a token: its hash, and whose it is.

    Args:
        sha256: of the token, in hexadecimal digits.
        made_s: of the wall clock.
    """

    name: str
    role: Role
    team: str
    sha256: str
    made_s: float


class Tokens:
    """All tokens of a daemon. Others than the daemon do not change the file.

    Args:
        path: of the file; it may be missing.
        operator: the token that may do all.

    Raises ``ValueError`` where the file cannot be read.
    """

    def __init__(self, path: Path, operator: bytes) -> None:
        self._path = path
        self._operator = operator
        self._changing = threading.Lock()
        self.listed: tuple[Token, ...] = ()
        if path.exists():
            try:
                self.listed = tuple(load(each, Token) for each in loads(path.read_bytes()))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} holds no tokens: {error}") from error

    def principal(self, header: bytes) -> Principal | None:
        """Of an ``Authorization`` header; None where nobody's token is in it."""
        if is_authorized(header, self._operator):
            return OPERATOR
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        hashed = sha256(given).hexdigest()
        found = next((each for each in self.listed if each.sha256 == hashed), None)
        return (
            None if found is None else Principal(name=found.name, role=found.role, team=found.team)
        )

    def add(self, name: str, role: Role, team: str = "") -> str:
        """Make a token; its text, which is kept nowhere. Raises ``ValueError``."""
        if not _NAME.fullmatch(name) or name == OPERATOR.name:
            raise ValueError(
                f"token {name!r}: a name is 1 to 64 characters out of A-Z a-z 0-9 . _ @ - "
                f"and not {OPERATOR.name!r}"
            )
        if team and role != "submit":
            raise ValueError(f"token {name}: a team (--team) is for the role submit")
        with self._changing:
            if any(each.name == name for each in self.listed):
                raise ValueError(f"token {name}: there is one already; revoke it first")
            text = secrets.token_urlsafe(32)
            hashed = sha256(text.encode()).hexdigest()
            made = Token(name=name, role=role, team=team, sha256=hashed, made_s=time.time())
            self._write((*self.listed, made))
        return text

    def revoke(self, name: str) -> None:
        """Nobody gets in with it any more. Raises ``ValueError`` on an unknown name."""
        with self._changing:
            left = tuple(each for each in self.listed if each.name != name)
            if len(left) == len(self.listed):
                raise ValueError(f"token {name}: there is none")
            self._write(left)

    def _write(self, tokens: tuple[Token, ...]) -> None:
        """Durable before it counts: a revoked token stays revoked."""
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(dumps(tokens))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self.listed = tokens
