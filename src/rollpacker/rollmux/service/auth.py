"""The bearer token: a file that only its owner can read."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

_SHORTEST = 16


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
