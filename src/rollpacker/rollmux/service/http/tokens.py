"""Bearer tokens besides the operator's: a file of their hashes, read again when it changes."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from rollpacker.core.codec import dumps, load, loads
from rollpacker.rollmux.service.api.roles import OPERATOR, ROLES, Principal, Role
from rollpacker.rollmux.service.http.token_file import is_authorized

_log = logging.getLogger(__name__)
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
    team: str = ""
    sha256: str = ""
    made_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ``ValueError``."""
        if not _NAME.fullmatch(self.name) or self.name == OPERATOR.name:
            raise ValueError(
                f"token {self.name!r}: a name is 1 to 64 characters out of A-Z a-z 0-9 . _ @ - "
                f"and not {OPERATOR.name!r}"
            )
        if self.role not in ROLES:
            raise ValueError(f"token {self.name}: --role is one of {', '.join(ROLES)}")
        if self.team and self.role != "submit":
            raise ValueError(f"token {self.name}: --team is for the role submit")


class Tokens:
    """Finds out whose token a request carries.

    Args:
        path: of the file; it may be missing.
        operator: the token that may do all.
    """

    def __init__(self, path: Path, operator: bytes) -> None:
        self._path = path
        self._operator = operator
        self._stamp: tuple[int, ...] | None = None
        self._known: dict[str, Principal] = {}

    def principal(self, header: bytes) -> Principal | None:
        """Of an ``Authorization`` header; None where nobody's token is in it."""
        if is_authorized(header, self._operator):
            return OPERATOR
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        self._look()
        return self._known.get(sha256(given).hexdigest())

    def _look(self) -> None:
        """Read the file again where it changed."""
        try:
            status = self._path.stat()
            # The time of a change of owner or mode too: then it may be readable.
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            stamp = None
        if stamp == self._stamp:
            return
        self._stamp, self._known = stamp, {}
        try:
            tokens = read_tokens(self._path)
        except (OSError, TypeError, ValueError) as error:
            _log.error("only the operator's token counts: %s cannot be read: %s", FILE, error)
            return
        self._known = {
            each.sha256: Principal(name=each.name, role=each.role, team=each.team)
            for each in tokens
        }


def read_tokens(path: Path) -> list[Token]:
    """Those of a file; none where it is missing. Raises ``ValueError``."""
    if not path.exists():
        return []
    return [load(each, Token) for each in loads(path.read_bytes())]


def add_token(path: Path, token: Token) -> str:
    """Make a token; its text, which is kept nowhere. Raises ``ValueError`` on a known name."""
    with _changing(path) as tokens:
        if any(each.name == token.name for each in tokens):
            raise ValueError(f"token {token.name}: there is one already; revoke it first")
        text = secrets.token_urlsafe(32)
        made = replace(token, sha256=sha256(text.encode()).hexdigest(), made_s=time.time())
        tokens.append(made)
    return text


def revoke_token(path: Path, name: str) -> None:
    """Nobody gets in with it any more. Raises ``ValueError`` on an unknown name."""
    with _changing(path) as tokens:
        left = [each for each in tokens if each.name != name]
        if len(left) == len(tokens):
            raise ValueError(f"token {name}: there is none")
        tokens[:] = left


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """One at a time changes the file, and readers see it before or after."""
    beside = path.with_name(f"{path.name}.lock")
    lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _give_to_owner(beside, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        tokens = read_tokens(path)
        yield tokens
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600), "wb") as file:
            _give_to_owner(new, file.fileno())
            file.write(dumps(tokens))
        new.replace(path)
    finally:
        os.close(lock)


def _give_to_owner(path: Path, made: int) -> None:
    """What root makes for a daemon of another user has to be that user's, or it cannot read it.

    Raises ``ValueError`` on what that user has put there to get a file of somebody else's.
    """
    if os.geteuid() != 0:
        return
    found, folder = os.fstat(made), path.parent.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise ValueError(f"{path} is a link, or no plain file: remove it")
    os.fchown(made, folder.st_uid, folder.st_gid)
