"""What hostile programs aim at: files, sockets and processes of the self-test."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


class Targets:
    """Targets for the time of a self-test; ``damage`` says what was hit."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        # Within the reach of every uid, so that only the sandbox is in the way.
        self._folder.chmod(0o777)
        self._victim = self._make("victim", "untouched")
        secret = self._make("secret", "secret")
        self._sockets = [self._listen(socket.AF_INET, ("127.0.0.1", 0))]
        unix = str(self._folder / "socket")
        abstract = f"rollpacker-{secrets.token_hex(8)}"
        self._sockets += [self._listen(socket.AF_UNIX, each) for each in (unix, f"\0{abstract}")]
        Path(unix).chmod(0o777)
        self._canary = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._before = self._listing()
        self.fields: dict[str, Any] = {
            "pid": os.getpid(),
            "canary": self._canary.pid,
            "folder": str(self._folder),
            "victim": str(self._victim),
            "secret": str(secret),
            "package": str(np.__file__),
            "port": self._sockets[0].getsockname()[1],
            "unix": unix,
            "abstract": abstract,
        }

    def _make(self, name: str, text: str) -> Path:
        file = self._folder / name
        file.write_text(text, encoding="ascii")
        file.chmod(0o666)
        return file

    def _listen(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        sock = self._stack.enter_context(socket.socket(family))
        sock.bind(address)
        sock.listen()
        sock.setblocking(False)
        return sock

    def _listing(self) -> list[tuple[str, int, float]]:
        files = ((path.name, path.lstat()) for path in self._folder.iterdir())
        return sorted((name, found.st_mode, found.st_mtime) for name, found in files)

    def damage(self) -> list[str]:
        """What hostile programs have changed, seen from outside."""
        found: list[str] = []
        if self._canary.poll() is not None:
            found.append("a process was killed")
        untouched = self._listing() == self._before and self._victim.read_text() == "untouched"
        if not untouched:
            found.append("files were changed")
        for sock in self._sockets:
            with contextlib.suppress(BlockingIOError):
                sock.accept()[0].close()
                found.append("a socket was connected to")
        return found

    def __enter__(self) -> Targets:
        return self

    def __exit__(self, *_: object) -> None:
        self._canary.kill()
        self._canary.wait()
        self._stack.close()
