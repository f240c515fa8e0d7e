"""A Postgres server of its own in a temporary folder, as a user without rights."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISSING = shutil.which("postgres") is None or shutil.which("initdb") is None


class Server:
    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder = folder
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._call("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "mux", "--no-sync")

    def _call(self, *command: str) -> None:
        done = subprocess.run(
            command, user=self._user, capture_output=True, text=True, cwd="/", check=False
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        command = ["postgres", "-D", str(self.folder / "data"), "-k", str(self.folder)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(
            [*command, "-c", "listen_addresses="], user=self._user, cwd="/", **quiet
        )
        ready = ["pg_isready", "-h", str(self.folder), "-q"]
        end = time.monotonic() + 60
        while subprocess.run(ready, check=False).returncode != 0:
            assert time.monotonic() < end, "Postgres did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """Without a shutdown; the files are recovered at the next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def database(self) -> str:
        """A new one; returns how to connect."""
        self._databases += 1
        name = f"mux{self._databases}"
        self._call("createdb", "-h", str(self.folder), "-U", "mux", name)
        return f"host={self.folder} user=mux dbname={name}"


@contextmanager
def postgres() -> Iterator[Server]:
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="mux-pg-"))
    try:
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        server = Server(folder, user)
        server.start()
        yield server
        server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
