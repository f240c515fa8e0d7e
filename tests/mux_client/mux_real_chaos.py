"""Faults for real: signals to processes of every kind, and cut connections; programs that tell."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from mux_real_daemon import free_port
from test_mux_programs import Cluster, keepers

from rollpacker.rollmux.node.keeper import MARK
from rollpacker.rollmux.service.client.client import MuxError, UnreachableError

TTL = 6.0
NODES = ("roll-0", "roll-1", "roll-2", "train-0", "train-1")
INVENTORY = """
nodes:
  - {name: "roll-[0-2]", pool: rollout, memory_gb: 64, devices: 1}
  - {name: "train-[0-1]", pool: train, memory_gb: 64, devices: 1}
"""
PROGRAM = """
import json, os, sys, time
from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient
from rollpacker.rollmux.service.client.client import MuxError, UnreachableError
from rollpacker.rollmux.service.client.phase import Phases
from rollpacker.rollmux.service.client.phase import StateLostError

url, token, job, attempt, iterations, path = sys.argv[1:]
file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def say(what, **more):
    line = {"t": time.monotonic(), "what": what, "job": job, "attempt": int(attempt), **more}
    os.write(file, json.dumps(line).encode() + b"\\n")

client = MuxClient(url, token, patience_s=3.0)
phases = Phases(client, job)
say("started")
while True:
    try:
        known = client.job(job)
        if known["done"] >= int(iterations):
            break
        with phases.phase(known["next"]) as permit:
            told = {"token": permit.token, "phase": permit.phase, "nodes": permit.nodes}
            say("begin", **told)
            for _ in range(8):
                time.sleep(0.05)
                phases.check()
                say("step", **told)
            phases.check()
            say("end", **told)
        say("counted", **told)
    except (LeaseLostError, StateLostError, UnreachableError):
        continue
    except MuxError as error:
        if error.code == "ended":
            break
        if error.code not in ("order", "over", "superseded", "complete"):
            raise
say("done")
"""


class Valve:
    """A TCP proxy that can be shut: what is under way comes later, or never."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = threading.Event()
        self._open.set()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener = socket.create_server(("127.0.0.1", free_port()), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        self._open.clear()

    def open(self, *, forget: bool) -> None:
        if forget:
            for pair in list(self._pairs):
                for each in pair:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
        self._open.set()

    def close(self) -> None:
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            self._open.wait()
            with socket.create_connection(("127.0.0.1", self._to)) as far:
                pair = (near, far)
                self._pairs.add(pair)
                try:
                    self._pump(near, far)
                finally:
                    self._pairs.discard(pair)

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    source: Any = key.fileobj
                    data = source.recv(65536)
                    self._open.wait()
                    if not data:
                        return
                    key.data.sendall(data)


class Storm:
    """A cluster under faults; whatever is stopped or cut goes on later."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.cluster = Cluster(folder, inventory=INVENTORY)
        (folder / "chaos.py").write_text(PROGRAM, encoding="utf-8")
        self.file = folder / "phases"
        self.valves = {node: Valve(self.cluster.daemon.port) for node in NODES}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.jobs: dict[str, int] = {}
        self.ended: set[str] = set()
        self.agents_started = 0
        self.tend()

    def submit(self, iterations: int) -> None:
        name = f"job-{len(self.jobs)}"
        told = ("{url}", "{token_file}", "{job}", "{attempt}", str(iterations), str(self.file))
        command = ("{python}", str(self.cluster.folder / "chaos.py"), *told)
        self.cluster.submit(name, *command, restarts=100, stop_s=1.0)
        self.jobs[name] = iterations

    def live(self) -> list[str]:
        with contextlib.suppress(UnreachableError):
            jobs = self.cluster.daemon.client().status()["jobs"]
            return [job["id"] for job in jobs if job["state"] != "ended"]
        return []

    def tend(self) -> None:
        """What a service manager and an operator do: agents run, nodes are open."""
        for node in NODES:
            agent = self.cluster.agents.get(node)
            if agent is None or agent.poll() is not None:
                self.cluster.agent(node, url=self.valves[node].url)
                self.agents_started += 1
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [each for each in self._later if each[0] > now]
        for act in due:
            act()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def calm(self) -> None:
        """Everything that is stopped, cut or closed goes on."""
        for _, act in self._later:
            act()
        self._later.clear()

    def open_nodes(self) -> None:
        client = self.cluster.daemon.client()
        for node in NODES:
            with contextlib.suppress(MuxError, UnreachableError):
                if client.node(node)["status"] in ("draining", "drained", "set_aside", "cordoned"):
                    client.call("POST", f"/v1/nodes/{node}/open", {}, os.urandom(8).hex())

    def fault(self) -> None:
        name = self.rng.choice(list(FAULTS))
        if FAULTS[name](self):
            self.faults[name] += 1

    def programs(self) -> list[psutil.Process]:
        return [child for keeper in keepers(self.cluster.folder) for child in _children(keeper)]

    def left(self) -> list[psutil.Process]:
        """Processes that carry the mark of an attempt of this cluster, and keepers."""
        found = keepers(self.cluster.folder)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK, "").startswith(str(self.cluster.folder)):
                    found.append(process)
        return found

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def close(self) -> None:
        self.calm()
        self.cluster.close()
        for valve in self.valves.values():
            valve.close()


def _children(keeper: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from keeper.children()


def _pick(storm: Storm, what: str) -> int | None:
    """The process to be hit."""
    if what == "daemon":
        assert storm.cluster.daemon.process is not None
        return storm.cluster.daemon.process.pid
    if what == "agent":
        return storm.rng.choice(list(storm.cluster.agents.values())).pid
    found = storm.programs() if what == "program" else keepers(storm.cluster.folder)
    return storm.rng.choice(found).pid if found else None


def _killed(what: str) -> Callable[[Storm], bool]:
    def kill(storm: Storm) -> bool:
        pid = _pick(storm, what)
        if pid is None:
            return False
        if what == "daemon":
            storm.cluster.daemon.kill()
            time.sleep(storm.rng.uniform(0.0, 2.0))
            storm.cluster.daemon.start()
        else:
            _send(pid, signal.SIGKILL)
        return True

    return kill


def _stopped(what: str, seconds: float) -> Callable[[Storm], bool]:
    def stop(storm: Storm) -> bool:
        pid = _pick(storm, what)
        if pid is not None:
            _send(pid, signal.SIGSTOP)
            if what == "daemon":  # nobody can be asked anything meanwhile
                time.sleep(seconds)
                _send(pid, signal.SIGCONT)
            else:
                storm.later(seconds, lambda: _send(pid, signal.SIGCONT))
        return pid is not None

    return stop


def _cut(seconds: float) -> Callable[[Storm], bool]:
    def cut(storm: Storm) -> bool:
        valve = storm.rng.choice(list(storm.valves.values()))
        forget = storm.rng.random() < 0.5
        valve.shut()
        storm.later(seconds, lambda: valve.open(forget=forget))
        return True

    return cut


def _drained(storm: Storm) -> bool:
    node = storm.rng.choice(NODES)
    with contextlib.suppress(MuxError, UnreachableError):
        body = {"status": "draining", "reason": "chaos"}
        storm.cluster.daemon.client().call(
            "POST", f"/v1/nodes/{node}/close", body, os.urandom(8).hex()
        )
        storm.later(4.0, storm.open_nodes)
        return True
    return False


def _ended(storm: Storm) -> bool:
    live = storm.live()
    if not live or storm.rng.random() < 0.5:
        return False
    name = storm.rng.choice(live)
    storm.ended.add(name)
    with contextlib.suppress(UnreachableError):
        storm.cluster.daemon.client().end(name)
    return True


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


SHORT_S, LONG_S = 1.0, 1.5 * TTL
FAULTS: dict[str, Callable[[Storm], bool]] = {
    **{f"{what} killed": _killed(what) for what in ("daemon", "agent", "keeper", "program")},
    **{
        f"{what} stopped, {how}": _stopped(what, seconds)
        for what in ("daemon", "agent", "keeper", "program")
        for how, seconds in (("short", SHORT_S), ("long", LONG_S))
    },
    "node cut off, short": _cut(SHORT_S),
    "node cut off, long": _cut(LONG_S),
    "node drained": _drained,
    "job ended": _ended,
}
