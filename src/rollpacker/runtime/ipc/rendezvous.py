"""Where the processes of other nodes come to their driver, and how strangers are kept out.

Both sides show that they know the run's key before anything of the other is unpickled
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
"""In which one that has come says who it is."""
_ENTERING_S = 60.0
"""In which one that has come is asked: strangers may be at the door before it."""
_AT_DOOR = 256
"""That are asked together; one more, and the first of them has to go, after"""
_FAIR_S = 0.5
"""in which one that knows the key has shown it."""
_PAUSE_S = 0.1
"""After one that could not be let in."""
_LONGEST_NAME = 64
_DRIVER, _AGENT = b"driver", b"agent"

Take = Callable[[str, socket.socket], None]
"""Takes the name of one that has come, and the connection to it."""


class Rendezvous:
    """Listens on one interface, for those that know the key.

    Args:
        take: called in ``loop`` with each that has shown that it knows the key.

    Raises ``OSError`` where it cannot listen.
    """

    def __init__(self, host: str, take: Take, loop: asyncio.AbstractEventLoop) -> None:
        self.key = secrets.token_bytes(32)
        self._take = take
        self._loop = loop
        self._at_door: dict[socket.socket, float] = {}
        self._room = Condition()
        self._closed = False
        self._socket = socket.create_server((host, 0), backlog=512)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        """Host and port."""
        Thread(target=self._listen, name="gate", daemon=True).start()

    def _listen(self) -> None:
        while not self._closed:
            if not self._next():
                # It goes by: too many open files or threads, or one that has hung up already.
                time.sleep(_PAUSE_S)

    def _next(self) -> bool:
        """Whether one has come, who is asked who it is."""
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
        """Where too many are asked, the one that is asked longest makes way."""
        with self._room:
            while len(self._at_door) >= _AT_DOOR:
                first, since = next(iter(self._at_door.items()))
                left = since + _FAIR_S - time.monotonic()
                if left > 0:
                    self._room.wait(left)
                    continue
                del self._at_door[first]
                with suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)  # whoever reads from it finds its end

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
        """Nobody asks any more; whether it had not to make way."""
        with self._room:
            self._room.notify()
            return self._at_door.pop(end, None) is not None

    def _let_in(self, name: str, end: socket.socket) -> None:
        if self._closed:
            end.close()
        else:
            self._take(name, end)

    def close(self) -> None:
        """Let nobody in any more; who is in stays."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _admit(end: socket.socket, key: bytes) -> str:
    """The name of one that has come. Raises what ``multiprocessing`` does, ``ValueError``."""
    _prepare(end, _PATIENCE_S)
    with _connection(end) as stranger:
        deliver_challenge(stranger, _of(_AGENT, key))
        answer_challenge(stranger, _of(_DRIVER, key))
        name = stranger.recv_bytes(_LONGEST_NAME).decode("ascii")
    _prepare(end, 0.0)
    return name


def enter(address: tuple[str, int], key: bytes, name: str) -> socket.socket:
    """A connection to the driver at ``address``, that will know it as ``name`` (ASCII, at most 64
    bytes).

    Raises ``OSError`` where nobody answers, ``multiprocessing.AuthenticationError`` on another
    run's key.
    """
    until = time.monotonic() + _ENTERING_S
    while True:
        try:
            return _entered(address, key, name)
        except (ConnectionResetError, TimeoutError):
            # Strangers crowd the door: it had to make way, or was not asked in.
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


def start_agent(host: str, port: int, key: str, name: str) -> subprocess.Popen[bytes]:
    """Start an agent that comes to the gate at ``host`` and ``port``, with its key (hex digits).

    It ends when its standard input closes, so also when whoever has started it is gone.
    """
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
    """What one side shows: nobody gets its answer by handing it another one's challenge."""
    return hmac.digest(key, side, "sha256")


def _prepare(end: socket.socket, limit_s: float) -> None:
    """Small messages go at once; whoever waits does so for ``limit_s`` at most, 0 for ever."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _connection(end: socket.socket) -> Connection:
    return Connection(os.dup(end.fileno()))
