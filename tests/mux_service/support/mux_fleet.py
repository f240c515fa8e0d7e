"""A daemon in a process of its own, and clients that keep a history of what they saw."""

import http.client
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.processes.children import OUTSIDE, shielded
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service import serve as serve_module
from rollpacker.rollmux.service.http.app import App
from rollpacker.rollmux.service.http.protocol import PatientProtocol
from rollpacker.rollmux.service.serve import ServeOptions, serve
from rollpacker.runtime.cluster.nodes import PRELOADED

CONTEXT = multiprocessing.get_context("forkserver")
# Jobs of the same pytest process are forked off the same server: the first to start it decides.
CONTEXT.set_forkserver_preload([*PRELOADED, "rollpacker.rollmux.service.serve", "mux_fleet"])
SETTINGS = Settings(cold_s=0.05, warm_s=0.0)
TTL = 1.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _serve(
    options: ServeOptions,
    ready: Any,
    patience: tuple[float, int] | None,
    file_limit: int | None,
) -> None:
    # Whoever ran a job in this process has forked it off one that signals do not reach.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE)
    if patience is not None:
        PatientProtocol.head_s, serve_module.STRANGERS = patience
        App.body_s = patience[0]
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    serve(options, lambda url, token: ready.set())


class Daemon:
    """``rollpacker mux serve`` in a child process that can be killed and started again."""

    def __init__(
        self,
        state: Path,
        ttl: float = TTL,
        tls: tuple[Path | None, Path | None] = (None, None),
        inventory: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.options = ServeOptions(
            state=state,
            port=self.port,
            ttl=ttl,
            settings=SETTINGS,
            inventory=inventory,
            tls_cert=tls[0],
            tls_key=tls[1],
        )
        self.patience: tuple[float, int] | None = None
        """Seconds for headers and bodies, and connections, in place of the usual ones."""
        self.file_limit: int | None = None
        """Bytes that a file may have."""
        self.recoveries: list[float] = []

    def start(self, timeout_s: float = 60.0) -> None:
        ready = CONTEXT.Event()
        began = time.monotonic()
        self.process = CONTEXT.Process(
            target=_serve,
            args=(
                self.options,
                ready,
                self.patience,
                self.file_limit,
            ),
            daemon=True,
        )
        with shielded():
            self.process.start()
        while not ready.wait(0.05):
            assert self.process.is_alive(), "the daemon did not start"
            assert time.monotonic() - began < timeout_s, "the daemon takes too long to start"
        self.recoveries.append(time.monotonic() - began)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        self.process.join(20)
        assert self.process.exitcode == 0

    @property
    def token(self) -> str:
        return (self.options.state / "token").read_text().strip()


@dataclass(slots=True)
class Op:
    """A request until it was answered for good: from its first send to its answer."""

    client: int
    kind: str
    args: tuple[Any, ...]
    key: str
    invoked: float
    answered: float
    status: int
    body: dict[str, Any]


class Link:
    """One connection, made again whenever it breaks."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection: http.client.HTTPConnection | None = None

    def once(
        self, method: str, path: str, body: object = None, key: str | None = None
    ) -> tuple[int, Any]:
        """One send. Raises ``OSError`` where no answer came."""
        headers = dict(self._headers)
        if key is not None:
            headers["Idempotency-Key"] = key
        data = None if body is None else json.dumps(body)
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise OSError(str(error)) from error
        if answer.getheader("connection") == "close":
            self.close()
        jsonish = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(raw) if raw and jsonish else raw.decode()

    def until_answered(
        self, method: str, path: str, body: object = None, key: str | None = None
    ) -> tuple[int, Any]:
        """Send again, with the same key, until there is an answer."""
        while True:
            try:
                status, found = self.once(method, path, body, key)
            except OSError:
                time.sleep(0.02)
                continue
            if status != 503:
                return status, found
            time.sleep(0.05)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@dataclass(slots=True)
class Use:
    """Nodes that a client worked on, in seconds of the monotonic clock."""

    token: int
    nodes: tuple[str, ...]
    start: float
    end: float


@dataclass(slots=True)
class History:
    ops: list[Op] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    stale: list[Op] = field(default_factory=list)
    """Finishes with tokens that are certainly over."""


class Client(threading.Thread):
    """Submits jobs and runs their phases until told to stop; then ends its last job."""

    def __init__(self, number: int, port: int, token: str, stop: threading.Event) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.number = number
        self.link = Link(port, token)
        self.random = random.Random(number)
        self.halt = stop
        self.history = History()
        self.count = 0
        self.dead: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            jobs = 0
            while not self.halt.is_set():
                self._job(f"job-{self.number}-{jobs}")
                jobs += 1
        except BaseException as error:
            self.error = error
        finally:
            self.link.close()

    def post(self, kind: str, path: str, body: object, *args: Any, key: str | None = None) -> Op:
        key = key or self._key()
        invoked = time.monotonic()
        status, found = self.link.until_answered("POST", path, body, key)
        found = found if isinstance(found, dict) else {}
        op = Op(self.number, kind, args, key, invoked, time.monotonic(), status, found)
        self.history.ops.append(op)
        return op

    def _key(self) -> str:
        self.count += 1
        return f"c{self.number}-{self.count}"

    def _job(self, name: str) -> None:
        iterations = self.random.randint(1, 4)
        spec = {
            "id": name,
            "worst_rollout_s": 0.2,
            "worst_train_s": 0.2,
            "slo": self.random.choice([2.0, 50.0, 1000.0]),
            "iterations": iterations,
        }
        op = self.post("submit", "/v1/jobs", spec, name)
        assert op.status == 201, op
        phase: str | None = "rollout"
        while phase is not None and not self.halt.is_set():
            phase = self._phase(name, phase)
            if self.random.random() < 0.2:
                self._look(name)
        op = self.post("end", f"/v1/jobs/{name}/end", {}, name)
        assert op.status in (200, 202), op

    def _look(self, name: str) -> None:
        invoked = time.monotonic()
        status, found = self.link.until_answered("GET", f"/v1/jobs/{name}")
        assert status == 200, found
        op = Op(self.number, "look", (name,), "", invoked, time.monotonic(), status, found)
        self.history.ops.append(op)

    def _phase(self, job: str, phase: str) -> str | None:
        """Run one phase; returns the next."""
        key = self._key()
        while not self.halt.is_set():
            body = {"phase": phase, "wait_s": 0.5}
            # A permit's deadline counts from before the send that it answers.
            sent = time.monotonic()
            op = self._ask(job, body, key, sent)
            if op.status == 204 or op.body.get("code") == "held":
                continue
            if "move" in op.body:
                self._move(job, op.body["move"])
                continue
            if op.status == 409:
                assert op.body["code"] in ("over", "order", "complete"), op
                return op.body["next"]
            assert op.status == 200, op
            return self._work(job, phase, op.body, op.invoked)
        return phase

    def _ask(self, job: str, body: dict[str, Any], key: str, sent: float) -> Op:
        while True:
            sent = time.monotonic()
            try:
                status, found = self.link.once("POST", f"/v1/jobs/{job}/permits", body, key)
            except OSError:
                time.sleep(0.02)
                continue
            if status != 503:
                found = found if isinstance(found, dict) else {}
                op = Op(self.number, "permit", (job,), key, sent, time.monotonic(), status, found)
                self.history.ops.append(op)
                return op
            time.sleep(0.05)

    def _move(self, job: str, move: dict[str, Any]) -> None:
        op = self.post("moved", f"/v1/jobs/{job}/moved", {"move": move["id"]}, job)
        assert op.status in (200, 409), op

    def _work(self, job: str, phase: str, permit: dict[str, Any], sent: float) -> str | None:
        token, nodes = permit["token"], tuple(permit["nodes"])
        deadline = sent + 0.9 * permit["ttl_s"]
        start = time.monotonic()
        use = Use(token, nodes, start, start)
        self.history.uses.append(use)
        fate = self.random.random()
        end = start + self.random.uniform(0.0, 0.03)
        if fate < 0.05:
            end = deadline + 0.01  # goes silent
        elif fate < 0.1:
            deadline = max(deadline, self._beat(token))
            end = start + 0.2
        time.sleep(max(min(end, deadline) - time.monotonic(), 0.0))
        use.end = max(min(time.monotonic(), deadline), start)
        self._try_stale(token)
        if end > deadline:
            return phase
        seconds = max(end - start, 0.001)
        kind = "abandon" if 0.1 < fate < 0.15 else "finish"
        body = {"seconds": seconds} if kind == "finish" else {}
        op = self.post(kind, f"/v1/permits/{token}/{kind}", body, job, token, phase)
        assert op.status in (200, 409), op
        self.dead.append(token)
        return op.body["next"] if op.status == 200 else phase

    def _beat(self, token: int) -> float:
        sent = time.monotonic()
        op = self.post("heartbeat", f"/v1/permits/{token}/heartbeat", {}, token)
        return sent + 0.9 * op.body["ttl_s"] if op.status == 200 else 0.0

    def _try_stale(self, token: int) -> None:
        """What was finished, and what nobody was given yet, is never accepted."""
        if self.random.random() > 0.15:
            return
        old = self.random.choice(self.dead) if self.dead else token + 100_000
        path = f"/v1/permits/{old}/{self.random.choice(['finish', 'abandon', 'heartbeat'])}"
        invoked = time.monotonic()
        body = {"seconds": 1.0} if path.endswith("finish") else {}
        status, found = self.link.until_answered("POST", path, body, self._key())
        self.history.stale.append(
            Op(self.number, "stale", (old,), "", invoked, time.monotonic(), status, found)
        )
