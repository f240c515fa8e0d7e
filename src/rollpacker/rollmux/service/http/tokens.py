"""Bearer tokens: files readable by their owners only, and the daemon's file of hashes.

Holders of the same token can seal messages for each other, since the daemon only has its hash.
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
_NONCE, _TAG = 16, 32  # lengths in bytes


def read_token(path: Path) -> bytes:
    """Read a token file. Raises ``ValueError`` if others may read it, or if it is too short."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path}: belongs to another user, but a token file must be your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{path}: mode {mode:04o} lets others read it: run chmod 600 {path}")
    token = path.read_bytes().strip()
    if len(token) < _SHORTEST or not token.isascii() or not token.decode().isprintable():
        raise ValueError(f"{path}: needs {_SHORTEST} or more printable characters without spaces")
    return token


def make_token(path: Path) -> None:
    """Write a new random token, unless the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def is_authorized(header: bytes, token: bytes) -> bool:
    """Whether an ``Authorization`` header carries the token, in constant time."""
    scheme, _, given = header.partition(b" ")
    same = hmac.compare_digest(given, token)
    return same and scheme.lower() == b"bearer"


def seal(key: bytes, token: bytes, about: str) -> str:
    """Encrypt a key of 32 bytes for holders of the token. ``unseal`` must repeat ``about``.

    It uses a one-time pad and a tag, both by HMAC-SHA256 of the token.
    """
    nonce = secrets.token_bytes(_NONCE)
    hidden = _xor(key, _mac(token, b"pad", nonce, about))
    return (nonce + hidden + _mac(token, b"tag", nonce + hidden, about)).hex()


def unseal(text: str, token: bytes, about: str) -> bytes:
    """The inverse of ``seal``. Raises ``ValueError`` for another token or context."""
    data = bytes.fromhex(text)
    nonce, hidden, tag = data[:_NONCE], data[_NONCE:-_TAG], data[-_TAG:]
    if not hmac.compare_digest(tag, _mac(token, b"tag", nonce + hidden, about)):
        raise ValueError("it was sealed with another token")
    return _xor(hidden, _mac(token, b"pad", nonce, about))


def _mac(token: bytes, use: bytes, data: bytes, about: str) -> bytes:
    return hmac.digest(token, b"\0".join((use, data, about.encode())), "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
FILE = "tokens.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Principal):
    """A stored token: its holder, its hash in hexadecimal digits, and its wall-clock time."""

    sha256: str
    made_s: float


class Tokens:
    """The operator's token, and those of a file that only the daemon changes.

    Raises ``ValueError`` if the file cannot be read.
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
                raise ValueError(f"{path} is not a file of tokens: {error}") from error

    def principal(self, header: bytes) -> Principal | None:
        """The holder of an ``Authorization`` header's token (None if it is unknown)."""
        if is_authorized(header, self._operator):
            return OPERATOR
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        hashed = sha256(given).hexdigest()
        return next((each for each in self.listed if each.sha256 == hashed), None)

    def add(self, name: str, role: Role, team: str = "") -> str:
        """Make a token and return its text, which is stored nowhere. Raises ``ValueError``."""
        if not _NAME.fullmatch(name) or name == OPERATOR.name:
            raise ValueError(
                f"token {name!r}: a name has 1 to 64 characters of A-Z a-z 0-9 . _ @ - and is not "
                f"{OPERATOR.name!r}"
            )
        if team and role != "submit":
            raise ValueError(f"token {name}: a team (--team) is for the role submit")
        with self._changing:
            if any(each.name == name for each in self.listed):
                raise ValueError(f"token {name}: this name is in use, so revoke its token first")
            text = secrets.token_urlsafe(32)
            hashed = sha256(text.encode()).hexdigest()
            made = Token(name=name, role=role, team=team, sha256=hashed, made_s=time.time())
            self._write((*self.listed, made))
        return text

    def revoke(self, name: str) -> None:
        """Revoke a token. Raises ``ValueError`` on an unknown name."""
        with self._changing:
            left = tuple(each for each in self.listed if each.name != name)
            if len(left) == len(self.listed):
                raise ValueError(f"token {name}: no token has this name")
            self._write(left)

    def _write(self, tokens: tuple[Token, ...]) -> None:
        """Write durably before it takes effect, so that a revoked token stays revoked."""
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(dumps(tokens))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self.listed = tokens
