"""A real daemon as a process that can be killed and started again; a proxy that loses answers."""

import contextlib
import multiprocessing
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rollpacker.cli import app, main
from rollpacker.processes.children import OUTSIDE, shielded
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.phase import Phases
from rollpacker.runtime.cluster.nodes import PRELOADED

COMMAND = (sys.executable, "-c", "from rollpacker.cli import main; main()")
SHARING = '{"lifetime": false, "repack": false}'
"""Settings under which jobs share nodes at once, however short they are."""


CONTEXT = multiprocessing.get_context("forkserver")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(words: Sequence[str], out: Connection) -> None:
    """``rollpacker WORDS`` in a forked process, which spares its imports."""
    # Whoever ran a job in this process has forked it off one that signals do not reach.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE)
    sys.argv = ["rollpacker", *words]
    with os.fdopen(os.dup(out.fileno()), "w") as file, contextlib.redirect_stdout(file):
        out.close()
        main()


class Daemon:
    """``rollpacker mux serve`` on one port, over one state folder."""

    def __init__(
        self, folder: Path, ttl: float = 5.0, first: Sequence[str] = ("--settings", SHARING)
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.ttl = ttl
        self.url = f"http://127.0.0.1:{self.port}"
        self.token_file = folder / "token"
        self.process: BaseProcess | None = None
        self._first = first
        """Options of its first start."""
        self.start()

    def start(self) -> None:
        words = ["mux", "serve", "--state", str(self.folder), "--port", str(self.port)]
        words += ["--ttl", str(self.ttl), *self._first]
        self._first = ()
        CONTEXT.set_forkserver_preload([*PRELOADED, "rollpacker.rollmux.service.serve"])
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_run, args=(words, theirs), daemon=True)
        with shielded():
            self.process.start()
        theirs.close()
        with os.fdopen(os.dup(ours.fileno())) as said:
            assert "listening" in said.readline()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.join()

    def mux(self, *words: str, code: int = 0) -> str:
        """``rollpacker mux WORDS`` to this daemon, which ends with ``code``."""
        here = ("--url", self.url, "--state", str(self.folder))
        done = CliRunner().invoke(app, ["mux", *words, *here])
        assert done.exit_code == code, done.output
        return done.stdout

    def client(self, url: str | None = None) -> MuxClient:
        return MuxClient(url or self.url, self.token_file, patience_s=60.0)

    def job(self, name: str, url: str | None = None, **options: Any) -> Phases:
        phases = Phases(self.client(url), name, **options)
        phases.submit(spec(name))
        return phases

    def finished(self, name: str) -> list[str]:
        """The phases of a job that were finished, in order."""
        timeline = self.client().timeline(3600.0)
        mine = [p for p in timeline if p["job"] == name and p["outcome"] == "done"]
        return [phase["phase"] for phase in sorted(mine, key=lambda phase: phase["start"])]


def spec(name: str, **changes: Any) -> JobSpec:
    return JobSpec(id=name, worst_rollout_s=1.0, worst_train_s=1.0, slo=8.0, **changes)


@contextlib.contextmanager
def forgetful_proxy(port: int) -> Iterator[str]:
    """Passes requests on to ``port``; of every second one the answer is lost."""
    count = iter(range(1, 1_000_000))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            size = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")]
            body = self.rfile.read(int(size[0].split(b":")[1])) if size else b""
            with socket.create_connection(("127.0.0.1", port)) as upstream:
                upstream.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
                answer = b""
                while data := upstream.recv(65536):
                    answer += data
            if next(count) % 2 == 0:
                self.wfile.write(answer)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def background(program: str, *words: object) -> subprocess.Popen[str]:
    """A Python program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
