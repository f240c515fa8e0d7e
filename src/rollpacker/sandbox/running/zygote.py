"""The zygote process as the trainer sees it: started, asked to fork, replaced when it dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollpacker.processes.shield import shielded
from rollpacker.sandbox.guest.zygote import EXIT, REQUEST
from rollpacker.sandbox.types import Level, SandboxUnavailableError

_FOLDER = str(Path(__file__).parents[1])
_CODE = "import sys; sys.path.append({!r}); from guest.zygote import main; main()"
_START_S = 60.0
_UID = 61_804
# Without these some interpreters do not start.
_INTERPRETER = ("LD_LIBRARY_PATH", "PYTHONHOME")


class ZygoteDiedError(Exception):
    """The zygote is gone; what ran in it has no outcome."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended: its wait status, its CPU seconds and the most bytes that it held."""

    status: int
    cpu_s: float
    peak: int


class Zygote:
    """One zygote; it runs one child at a time, and ends with the thread that made it.

    Args:
        level: isolation of its children.

    Raises:
        SandboxUnavailableError: this machine has not got the level.
    """

    def __init__(self, level: Level) -> None:
        self.level: Level = level
        self.cpu_s = 0.0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            with shielded():
                self._popen = _spawn(level, theirs.fileno(), errors)
            theirs.close()
            try:
                self._greet(errors)
            except BaseException:
                self.close()
                raise

    def _greet(self, errors: IO[bytes]) -> None:
        self._sock.settimeout(_START_S)
        try:
            reply = json.loads(self._sock.recv(4096) or b"null")
        except OSError as error:
            reply = {"error": f"the zygote did not start: {error}"}
        if reply is None:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
            reply = {"error": f"the zygote ended: {' '.join(lines[-1:])}"}
        if "error" in reply:
            raise SandboxUnavailableError(
                f"sandbox level '{self.level}' does not work on this machine: {reply['error']}"
            )

    def fork(self, descriptors: Sequence[int], request: tuple[int, int, int, int]) -> int:
        """Start a child with these descriptors; its pidfd, which the caller closes.

        ``request`` is that of ``guest.zygote``.

        Raises ``ZygoteDiedError``, also of a zygote that does not answer.
        """
        try:
            socket.send_fds(self._sock, [REQUEST.pack(*request)], list(descriptors))
            reply, received, _, _ = socket.recv_fds(self._sock, 1, 1)
        except OSError as error:
            raise ZygoteDiedError from error
        if not reply or not received:
            raise ZygoteDiedError
        return received[0]

    def wait(self, seconds: float) -> Exit | None:
        """How the child ended; None when not within ``seconds``. Raises ``ZygoteDiedError``."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError as error:  # closed by another thread
            raise ZygoteDiedError from error
        # Rounded up: a wait cut short would spin.
        if not poll.poll(math.ceil(seconds * 1000.0)):
            return None
        try:
            reply = self._sock.recv(EXIT.size)
        except OSError as error:
            raise ZygoteDiedError from error
        if len(reply) < EXIT.size:
            raise ZygoteDiedError
        status, cpu_s, self.cpu_s, peak_kib = EXIT.unpack(reply)
        return Exit(status, cpu_s, peak_kib << 10)

    def close(self) -> None:
        """End it and what runs in it."""
        self._sock.close()
        # It ends by itself when its socket closes, and so kills its child first.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        self._popen.kill()
        self._popen.wait()


def _spawn(level: Level, descriptor: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    options = {
        "socket": descriptor,
        "level": level,
        "uid": _UID if _can_change_uid() else None,
        "folder": _FOLDER,
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8"),
            *("-c", _CODE.format(_FOLDER), json.dumps(options)),
        ],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=_clean_environment(),
        cwd="/",
        start_new_session=True,
    )


def _clean_environment() -> dict[str, str]:
    # A fixed seed, so that the order of a set does not depend on the zygote.
    kept = {name: os.environ[name] for name in _INTERPRETER if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}


def _can_change_uid() -> bool:
    """Whether this is root and the standard library is open to others."""
    if os.geteuid() != 0:
        return False
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (library, *library.parents))
