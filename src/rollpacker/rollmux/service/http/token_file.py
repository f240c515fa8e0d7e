"""The bearer token: a file that only its owner can read, and what is sealed with one.

What those that share a token tell each other through the daemon is sealed: it knows hashes of all
tokens but the operator's, and passes on what nobody else who may look can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

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
