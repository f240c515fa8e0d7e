"""A cluster on this machine: agents as processes of its own, with nothing but a gate between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from runtime_jobs import Workshop, run

from rollpacker.config import RunConfig
from rollpacker.job.plan import build
from rollpacker.runtime.cluster.cluster import RunNodes
from rollpacker.runtime.cluster.nodes import Start, start_processes
from rollpacker.runtime.step.phase_nodes import PhaseNodes

BEAT_S = 1.0
# At the first completion after `at`, waits until the test has struck.
STRIKE = """
import time
from pathlib import Path

SEEN = 0


def strike(completions, prompts, wanted, at=5, slow=0.0, **_):
    global SEEN
    SEEN += len(completions)
    done = Path(wanted + ".done")
    if done.exists():
        time.sleep(slow)
    if SEEN > at and not done.exists():
        Path(wanted).touch()
        for _ in range(600):
            if done.exists():
                break
            time.sleep(0.05)
    return [float(c.count("1") > 0) for c in completions]
"""


class Launcher:
    """Starts agents as a cluster's own system would.

    Args:
        before: words before an agent's command.
        proxy: agents reach the driver through one that a test can close.
    """

    host = "127.0.0.1"

    def __init__(self, before: Sequence[str] = (), *, proxy: bool = False) -> None:
        self.agents: list[subprocess.Popen[bytes]] = []
        self.gone: list[subprocess.Popen[bytes]] = []
        self.proxies: list[Proxy] = []
        self._before = before
        self._proxy = proxy

    async def launch(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        self.gone += self.agents
        self.agents, self.proxies = [], []
        for name in names:
            place = address
            if self._proxy:
                self.proxies.append(Proxy(address))
                place = self.proxies[-1].address
            self.agents.append(self._started(place, key, name))
            await asyncio.sleep(0)

    async def replace(self, address: tuple[str, int], key: bytes, number: int, name: str) -> None:
        self.agents[number].kill()
        self.gone.append(self.agents[number])
        if self._proxy:
            self.proxies[number] = Proxy(address)
            address = self.proxies[number].address
        self.agents[number] = self._started(address, key, name)

    def _started(self, address: tuple[str, int], key: bytes, name: str) -> subprocess.Popen[bytes]:
        command = [*self._before, sys.executable, "-m", "rollpacker.runtime.cluster.agent"]
        agent = subprocess.Popen(
            [*command, address[0], str(address[1]), name], stdin=subprocess.PIPE
        )
        assert agent.stdin is not None
        agent.stdin.write(f"{key.hex()}\n".encode())
        agent.stdin.flush()
        return agent

    def agent(self, node: int) -> psutil.Process:
        return psutil.Process(self.agents[node].pid)

    def worker(self, node: int, number: int) -> psutil.Process:
        """The node's workers are forked off one child of its agent, in the order of their ranks."""
        agent = self.agent(node)
        forked = [p for p in agent.children(recursive=True) if p.ppid() != agent.pid]
        return sorted(forked, key=lambda p: p.pid)[number]

    def close(self) -> None:
        for agent in (*self.agents, *self.gone):
            assert agent.stdin is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGCONT)
            agent.stdin.close()
            agent.wait(90)  # it knocks for a minute where the door was cut off
        for proxy in self.proxies:
            proxy.close()


class Proxy:
    """Forwards connections until it drops everything, without closing anything."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.dropping = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                other = socket.create_connection(self._to)
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.dropping.is_set():
                    continue
                sink.sendall(data)
            if not self.dropping.is_set():
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()


@contextlib.contextmanager
def on(launcher: Launcher) -> Iterator[Launcher]:
    """Jobs of this process run on its nodes."""

    def nodes_of(config: RunConfig, _: object = None, start: Start = start_processes) -> RunNodes:
        return RunNodes(config, launcher, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "nodes_of", nodes_of)
        yield launcher


def struck(
    shop: Workshop,
    launcher: Launcher,
    name: str,
    strike: Callable[[Launcher], object],
    *,
    at: int = 5,
    resume: bool = False,
    phases: PhaseNodes | None = None,
    **changes: Any,
) -> tuple[Path, str]:
    """A run in which ``strike`` happens after the grades of ``at`` responses."""
    wanted = shop.folder / f"{name}.wanted"
    config = striking(shop, name, wanted, at, **changes)

    def watch() -> None:
        for _ in range(2400):
            if wanted.exists():
                strike(launcher)
                Path(f"{wanted}.done").touch()
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with on(launcher):
            return run(config, resume=resume, phases=phases)
    finally:
        wanted.touch()
        watcher.join()


def striking(shop: Workshop, name: str, wanted: Path, at: int, **changes: Any) -> RunConfig:
    rewards = shop.folder / "strike.py"
    rewards.write_text(STRIKE, encoding="utf-8")
    options = {"wanted": str(wanted), "at": at, "slow": changes.pop("slow", 0.0)}
    reward = {"function": f"{rewards}:strike", "options": options}
    settings: dict[str, Any] = {"epochs": 1, "cluster__heartbeat_s": BEAT_S, "deterministic": True}
    settings |= {"checkpoint__every": 1, "output": str(shop.folder / "out" / name)}
    return shop.config(name, rewards=[reward], **(settings | changes))
