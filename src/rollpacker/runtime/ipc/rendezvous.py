"""The driver's door for processes of other nodes, which keeps strangers out.

Both sides show that they know the run's key before either unpickles anything
(``multiprocessing.connection``: HMAC over a random challenge). Nothing is encrypted: a run's
network is its cluster's own, as it is for Ray, NCCL and gloo.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Condition, Thread

_PATIENCE_S = 10.0
"""Seconds for a connection to show the key and its name."""
_ENTERING_S = 60.0
"""Seconds for a connection to be handled, as strangers may come first."""
_AT_DOOR = 256
"""The most connections that are handled together."""
_FAIR_S = 0.5
"""After so many seconds the oldest one makes room. An agent has shown its key by then."""
_PAUSE_S = 0.1
_LONGEST_NAME = 64
_DRIVER, _AGENT = b"driver", b"agent"

Take = Callable[[str, socket.socket], None]
"""Takes the name of an admitted connection, and its socket."""


class Rendezvous:
    """Listens on one interface for processes that know the key. It calls ``take`` in ``loop`` for
    each. Raises ``OSError`` if it cannot listen."""

    def __init__(self, host: str, take: Take, loop: asyncio.AbstractEventLoop) -> None:
        self.key = secrets.token_bytes(32)
        self._take = take
        self._loop = loop
        self._at_door: dict[socket.socket, float] = {}
        self._room = Condition()
        self._closed = False
        self._socket = socket.create_server((host, 0), backlog=512)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        Thread(target=self._listen, name="gate", daemon=True).start()

    def _listen(self) -> None:
        while not self._closed:
            if not self._next():
                # Temporary: too many open files or threads, or the other side has hung up.
                time.sleep(_PAUSE_S)

    def _next(self) -> bool:
        """Accept a connection and begin to authenticate it. False if that fails."""
        try:
            end, _ = self._socket.accept()
        except OSError:
            return False
        self._make_room()
        with self._room:
            self._at_door[end] = time.monotonic()
        try:
            Thread(target=self._ask, args=(end,), name="gate", daemon=True).start()
        except RuntimeError:
            self._left(end)
            end.close()
            return False
        return True

    def _make_room(self) -> None:
        """If too many connections are handled, close the oldest one."""
        with self._room:
            while len(self._at_door) >= _AT_DOOR:
                first, since = next(iter(self._at_door.items()))
                left = since + _FAIR_S - time.monotonic()
                if left > 0:
                    self._room.wait(left)
                    continue
                del self._at_door[first]
                with suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)  # its thread reads the end

    def _ask(self, end: socket.socket) -> None:
        try:
            name = _admit(end, self.key)
        except (OSError, EOFError, ValueError, AuthenticationError):
            self._left(end)
            end.close()
            return
        if not self._left(end):
            end.close()
            return
        try:
            self._loop.call_soon_threadsafe(self._let_in, name, end)
        except RuntimeError:  # the loop has ended
            end.close()

    def _left(self, end: socket.socket) -> bool:
        """Forget a connection. False if ``_make_room`` has closed it."""
        with self._room:
            self._room.notify()
            return self._at_door.pop(end, None) is not None

    def _let_in(self, name: str, end: socket.socket) -> None:
        if self._closed:
            end.close()
        else:
            self._take(name, end)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _admit(end: socket.socket, key: bytes) -> str:
    """Authenticate, and return the name. Raises as ``multiprocessing`` does, or ``ValueError``."""
    _prepare(end, _PATIENCE_S)
    with _connection(end) as stranger:
        deliver_challenge(stranger, _of(_AGENT, key))
        answer_challenge(stranger, _of(_DRIVER, key))
        name = stranger.recv_bytes(_LONGEST_NAME).decode("ascii")
    _prepare(end, 0.0)
    return name


def enter(address: tuple[str, int], key: bytes, name: str) -> socket.socket:
    """Connect to the driver at ``address`` under ``name`` (ASCII, at most 64 bytes). Raises
    ``OSError`` if there is no answer, ``multiprocessing.AuthenticationError`` on another key."""
    until = time.monotonic() + _ENTERING_S
    while True:
        try:
            return _entered(address, key, name)
        except (ConnectionResetError, TimeoutError):
            # Many strangers: the driver closed this connection to make room, or did not handle it.
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


def start_agent(host: str, port: int, key: str, name: str) -> subprocess.Popen[bytes]:
    """Start an agent that connects to the driver with its key (hex digits). It ends when its
    standard input closes, so also with this process."""
    command = [sys.executable, "-m", "rollpacker.runtime.cluster.agent", host, str(port), name]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert agent.stdin is not None
    agent.stdin.write(f"{key}\n".encode())
    agent.stdin.flush()
    return agent


def _entered(address: tuple[str, int], key: bytes, name: str) -> socket.socket:
    end = socket.create_connection(address, timeout=_PATIENCE_S)
    end.settimeout(None)
    _prepare(end, _ENTERING_S)
    try:
        with _connection(end) as driver:
            answer_challenge(driver, _of(_AGENT, key))
            deliver_challenge(driver, _of(_DRIVER, key))
            driver.send_bytes(name.encode("ascii"))
    except EOFError as error:
        end.close()
        raise ConnectionResetError(f"{address[0]}:{address[1]} has hung up") from error
    except BaseException:
        end.close()
        raise
    _prepare(end, 0.0)
    return end


def _of(side: bytes, key: bytes) -> bytes:
    """A side's own key, so that nobody can answer a challenge by sending it back."""
    return hmac.digest(key, side, "sha256")


def _prepare(end: socket.socket, limit_s: float) -> None:
    """Send small messages at once, and wait at most ``limit_s``, 0 for ever."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _connection(end: socket.socket) -> Connection:
    return Connection(os.dup(end.fileno()))
