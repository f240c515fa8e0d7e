"""Bearer tokens: files that only their owners can read, and the daemon's file of hashes.

Those that share a token seal what they tell each other through the daemon with it: the daemon knows
only the hashes of all tokens but the operator's.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rollpacker.core.codec import dumps, load, loads
from rollpacker.rollmux.service.api.roles import OPERATOR, Principal, Role

_SHORTEST = 16
_NONCE, _TAG = 16, 32
"""Bytes."""


def read_token(path: Path) -> bytes:
    """The token of a file. Raises ``ValueError`` where others may read it or it is too short."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path}: belongs to another user; the token file must be your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{path}: mode {mode:04o} lets others read it; chmod 600 {path}")
    token = path.read_bytes().strip()
    if len(token) < _SHORTEST or not token.isascii() or not token.decode().isprintable():
        raise ValueError(f"{path}: needs {_SHORTEST} or more printable characters without spaces")
    return token


def make_token(path: Path) -> None:
    """Write a new random token, unless the file is there."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def is_authorized(header: bytes, token: bytes) -> bool:
    """Whether an ``Authorization`` header carries the token; takes the same time for any other."""
    scheme, _, given = header.partition(b" ")
    same = hmac.compare_digest(given, token)
    return same and scheme.lower() == b"bearer"


def seal(key: bytes, token: bytes, about: str) -> str:
    """A key of 32 bytes for those who have the token.

    Encrypted with a pad that is used once and authenticated, both by HMAC-SHA256 of the token.

    Args:
        about: what the key is for; ``unseal`` has to say the same.
    """
    nonce = secrets.token_bytes(_NONCE)
    hidden = _xor(key, _mac(token, b"pad", nonce, about))
    return (nonce + hidden + _mac(token, b"tag", nonce + hidden, about)).hex()


def unseal(text: str, token: bytes, about: str) -> bytes:
    """The inverse of ``seal``. Raises ``ValueError`` where it was sealed with another token, or
    about something else."""
    data = bytes.fromhex(text)
    nonce, hidden, tag = data[:_NONCE], data[_NONCE:-_TAG], data[-_TAG:]
    if not hmac.compare_digest(tag, _mac(token, b"tag", nonce + hidden, about)):
        raise ValueError("sealed with another token")
    return _xor(hidden, _mac(token, b"pad", nonce, about))


def _mac(token: bytes, use: bytes, data: bytes, about: str) -> bytes:
    return hmac.digest(token, b"\0".join((use, data, about.encode())), "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
FILE = "tokens.json"
"""In the daemon's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Principal):
    """What is kept of a token: whose it is, its hash in hexadecimal digits, and when it was made,
    by the wall clock."""

    sha256: str
    made_s: float


class Tokens:
    """All tokens of a daemon: the operator's, and those of a file, which only the daemon changes.

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
        return next((each for each in self.listed if each.sha256 == hashed), None)

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
