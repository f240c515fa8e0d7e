"""A client of the daemon's HTTP API, for jobs and nodes.

Every POST is repeated with the same idempotency key until an answer comes. The request is therefore
carried out once, even if messages are lost or the daemon restarts.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from rollpacker.core.codec import load, plain
from rollpacker.core.types import Phase
from rollpacker.errors import visible
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.http.tokens import read_token, seal, unseal

if TYPE_CHECKING:  # a job needs nothing that serves HTTP
    from rollpacker.rollmux.service.api import answers


SOCKET_S = 10.0
_UNAUTHORIZED = 401
_AGAIN = (408, 503)  # the request was incomplete, or its outcome is unknown
_PAUSE_S = (0.05, 1.0)
_NO_HTTP = (ssl.SSLError, http.client.BadStatusLine, ConnectionResetError)
_SCHEME = "; check http:// or https:// in --url (mux.url): the daemon may use the other one"
_KEPT_S = 60.0  # seconds to keep an idle connection, less than the daemon does


class MuxError(RuntimeError):
    """The daemon refused. ``status`` and ``answer`` (its JSON object) have the reason."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer.get("error", f"HTTP status {status}")))
        self.status = status
        self.answer = answer
        self.code = str(answer.get("code", ""))


class UnreachableError(ConnectionError):
    """No answer came in time. The request may or may not have been carried out."""


class AilingDaemonError(UnreachableError):
    """The daemon answered but could not finish in time. Its disk may be full."""


def new_key() -> str:
    """An idempotency key."""
    return uuid.uuid4().hex


class DaemonLink:
    """A connection to one daemon, safe to share between threads.

    Without an answer it repeats a request for ``patience_s`` seconds. Raises ``ValueError`` for a
    wrong address, token file or certificate.
    """

    def __init__(
        self,
        url: str,
        token_file: str | Path,
        *,
        cafile: str | Path | None = None,
        patience_s: float = 300.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"mux.url (--url) must be http://HOST:PORT or https://HOST:PORT, got {url!r}"
            )
        self._connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            self._connect = partial(http.client.HTTPSConnection, context=_trusted(cafile))
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.address = f"{host}:{parts.port}" if parts.port else host
        self._host, self._port = parts.hostname, parts.port
        self.token, self._token_file = _token(token_file), token_file
        self._patience_s = patience_s
        self._answered = False  # whether the address ever worked
        self._kept: tuple[http.client.HTTPConnection, float] | None = None
        """A connection for the next request, and the time until which it is good."""
        self._lock = threading.Lock()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        key: str | None = None,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> tuple[float, Any]:
        """The time just before the answered request was sent, and the answer, an object.

        The daemon may take ``wait_s`` seconds. Raises ``MuxError``, ``UnreachableError``, and
        ``ValueError`` for an untrusted certificate.
        """
        patience = self._patience_s if patience_s is None else patience_s
        give_up = time.monotonic() + patience
        pause, longest = _PAUSE_S
        kind, problem = UnreachableError, ""
        while True:
            sent = time.monotonic()
            left = give_up - sent
            try:
                timeout = wait_s + min(SOCKET_S, max(0.1, left))
                status, answer = self._once(method, path, body, key, timeout)
            except ssl.SSLCertVerificationError as error:
                raise ValueError(
                    f"mux.cafile (--cafile): the certificate of {self.address} is not trusted: "
                    f"{error.verify_message}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if kind is UnreachableError:
                    problem = f"{type(error).__name__}: {error}"
                if not self._answered and isinstance(error, _NO_HTTP):
                    problem += _SCHEME
            else:
                self._answered = True
                if status < 300:
                    return sent, answer
                if status not in _AGAIN:
                    raise self._refusal(status, answer)
                kind, problem = AilingDaemonError, str(MuxError(status, answer))
            if time.monotonic() + pause >= give_up:
                raise kind(f"{self.address}{path}: {problem}")
            time.sleep(pause)
            pause = min(longest, 2 * pause)

    def _refusal(self, status: int, answer: Mapping[str, Any]) -> MuxError:
        if status != _UNAUTHORIZED:
            return MuxError(status, answer)
        text = f"{self._token_file}: the daemon refuses this token"
        return MuxError(status, {"error": f"mux.token_file (--token-file) {text}"})

    def _once(
        self, method: str, path: str, body: object, key: str | None, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        headers = {
            "Authorization": f"Bearer {self.token.decode()}",
            "Content-Type": "application/json",
        }
        if key is not None:
            headers["Idempotency-Key"] = key
        connection = self._take(timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        return response.status, _parse(data)

    def _take(self, timeout: float) -> http.client.HTTPConnection:
        """The kept connection if nothing has arrived on it (only its end can), else a new one."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept[0].sock is not None:
            connection, until = kept
            if time.monotonic() < until and not wait([connection.sock], 0):
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        return self._connect(self._host, self._port, timeout=timeout)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._kept is None and connection.sock is not None:
                self._kept = connection, time.monotonic() + _KEPT_S
                return
        connection.close()


def _parse(data: bytes) -> dict[str, Any]:
    """The answer's object. Raises ``HTTPException`` if the data is not the daemon's."""
    if not data:
        return {}
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise http.client.HTTPException(f"not JSON: {data[:80]!r}") from error
    if not isinstance(answer, dict):
        raise http.client.HTTPException(f"not a JSON object: {data[:80]!r}")
    return answer


def _token(path: str | Path) -> bytes:
    try:
        return read_token(Path(path))
    except FileNotFoundError as error:
        raise ValueError(
            f"mux.token_file (--token-file): there is no {path}. A daemon makes its operator's "
            "token in its folder (--state) at its first start"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"mux.token_file (--token-file): {error}") from error


def _trusted(cafile: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if not cafile else str(cafile))
    except OSError as error:
        raise ValueError(f"mux.cafile (--cafile) {cafile}: {error}") from error


SAFE_SHARE = 0.9
"""Share of a lease in which its holder works. The rest is for clock drift and stopping."""
_WAIT_S = 20.0
_LONGEST_REASON = 1000


class LeaseLostError(RuntimeError):
    """Another job may have the nodes now: stop, and ask for the phase again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePermit:
    """A lease of nodes for one phase of a job.

    Args:
        token: fencing token, higher than all earlier ones.
        stop_at: monotonic seconds after which nothing may run.
        lease_s: seconds of a whole lease.
    """

    token: int
    phase: Phase
    nodes: tuple[str, ...]
    stop_at: float
    lease_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Instead of a permit: load the job's state on other nodes first, then report ``moved``.

    The reason is ``repack``, ``guard``, ``drain``, ``resume`` (after its nodes went to another
    team) or ``failure`` (load a checkpoint).
    """

    id: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGate:
    """The address where an attempt's driver admits the processes of its other nodes.

    Both sides prove that they know ``key``. The processes' ``names`` are by their nodes' ranks.
    """

    host: str
    port: int
    key: bytes
    names: Sequence[str]


def _about(job: str, attempt: int, host: str, port: int, names: Sequence[str]) -> str:
    return f"gate {job} {attempt} {host} {port} {' '.join(names)}"


class MuxClient(DaemonLink):
    """The requests of jobs and nodes."""

    def submit(self, spec: JobSpec) -> None:
        """Register a job. Raises ``MuxError`` (409: ``exists``, ``draining`` or ``too_large``)."""
        self.call("POST", "/v1/jobs", plain(spec), new_key())

    def job(self, job: str) -> answers.JobView:
        """The daemon's view of a job. Raises ``MuxError`` (404 if it is unknown)."""
        return self.call("GET", f"/v1/jobs/{quote(job, safe='')}")[1]

    def status(self) -> answers.Status:
        return self.call("GET", "/v1/status")[1]

    def timeline(self, window_s: float) -> list[answers.PhaseRun]:
        return self.call("GET", f"/v1/timeline?window_s={window_s:g}")[1]["phases"]

    def permit(
        self, job: str, phase: Phase, key: str, *, wait_s: float = _WAIT_S
    ) -> PhasePermit | MoveOrder | None:
        """Ask for a phase's nodes (None if it is not the job's turn, so ask again with the same
        key).

        The answer comes within ``wait_s``, at most 60 s. Raises ``MuxError`` if waiting is useless.
        See its ``code``.
        """
        body = {"phase": phase, "wait_s": wait_s}
        path = f"/v1/jobs/{quote(job, safe='')}/permits"
        sent, answer = self.call("POST", path, body, key, wait_s=wait_s)
        if not answer:
            return None
        if "move" in answer:
            return load(answer["move"], MoveOrder)
        return PhasePermit(
            token=answer["token"],
            phase=answer["phase"],
            nodes=tuple(answer["nodes"]),
            stop_at=sent + SAFE_SHARE * answer["ttl_s"],
            lease_s=answer["lease_s"],
            job=job,
        )

    def heartbeat(self, permit: PhasePermit) -> tuple[float, bool]:
        """Extend a lease. Raises ``LeaseLostError``.

        Returns the new ``stop_at``, and whether another job has the nodes of a rollout's tail.
        """
        patience = permit.stop_at - time.monotonic()
        sent, answer = self._for_permit(permit, "heartbeat", {}, patience)
        return sent + SAFE_SHARE * answer["ttl_s"], answer["release_tail"]

    def tail(self, job: str, permit: PhasePermit) -> bool:
        """Report that most responses of a running rollout are done. Raises ``LeaseLostError``.

        True if another job has the nodes: the rest must move to a quarter of the workers.
        """
        path = f"/v1/jobs/{quote(job, safe='')}/tail"
        try:
            return self.call("POST", path, {"token": permit.token}, new_key())[1]["release_tail"]
        except MuxError as error:
            raise LeaseLostError(f"permit {permit.token} ({permit.phase}): {error}") from error

    def finish(self, permit: PhasePermit, seconds: float, key: str) -> answers.DoneAnswer:
        """Finish a phase that took ``seconds`` alone. Raises ``LeaseLostError``."""
        return self._for_permit(permit, "finish", {"seconds": seconds}, None, key)[1]

    def abandon(self, permit: PhasePermit) -> None:
        """Give the nodes back with the phase unfinished. Does nothing if the lease is lost."""
        try:
            self._for_permit(permit, "abandon", {}, SOCKET_S)
        except (LeaseLostError, UnreachableError):
            return

    def moved(self, job: str, move: MoveOrder, key: str | None = None) -> None:
        path = f"/v1/jobs/{quote(job, safe='')}/moved"
        self.call("POST", path, {"move": move.id}, key or new_key())

    def end(self, job: str, *, patience_s: float | None = None) -> None:
        """The job is done or given up, so free its nodes."""
        path = f"/v1/jobs/{quote(job, safe='')}/end"
        self.call("POST", path, {}, new_key(), patience_s=patience_s)

    def node_alive(
        self,
        node: str,
        attempts: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent: str = "",
        patience_s: float | None = None,
    ) -> tuple[float, answers.AliveAnswer]:
        """Report a node, and its programs if its agent starts some.

        Returns the time just before the request was sent, and the answer. Raises ``MuxError`` (410
        when the node has failed, 409 ``taken`` when another agent reports it).
        """
        path = f"/v1/nodes/{quote(node, safe='')}/heartbeat"
        body = {"attempts": attempts, "agent": agent}
        return self.call("POST", path, body, new_key(), patience_s=patience_s)

    def printed(
        self, job: str, number: int, at: int, data: bytes, *, patience_s: float | None = None
    ) -> tuple[int, bool]:
        """Send an attempt's output from byte ``at``. Returns the daemon's bytes, and whether it is
        full."""
        path = f"/v1/jobs/{quote(job, safe='')}/attempts/{number}/log"
        body = {"at": at, "data": base64.b64encode(data).decode()}
        answer = self.call("POST", path, body, new_key(), patience_s=patience_s)[1]
        return answer["have"], answer["full"]

    def open_gate(
        self, job: str, attempt: int, host: str, port: int, key: bytes, names: Sequence[str]
    ) -> None:
        """Publish the address of the driver of the job's running attempt. See ``gate``."""
        sealed = seal(key, self.token, _about(job, attempt, host, port, names))
        body = {"host": host, "port": port, "key": sealed, "names": [*names]}
        self.call("POST", f"/v1/jobs/{quote(job, safe='')}/gate", body, new_key())

    def gate(self, job: str, attempt: int) -> DriverGate:
        """The address of an attempt's driver.

        Raises ``MuxError`` (404, ``no_gate``: not yet), and ``ValueError`` if the driver has
        another token.
        """
        path = f"/v1/jobs/{quote(job, safe='')}/gate?attempt={attempt}"
        found = self.call("GET", path)[1]
        host, port, names = found["host"], found["port"], found["names"]
        try:
            key = unseal(found["key"], self.token, _about(job, attempt, host, port, names))
        except ValueError as error:
            raise ValueError(
                f"job {job}: its driver at {host}:{port} has another token than this node. All "
                "agents of a job's nodes need the same token (--token-file)"
            ) from error
        return DriverGate(host=host, port=port, key=key, names=names)

    def register(
        self, machine: Machine, *, agent: str = "", patience_s: float | None = None
    ) -> float:
        """Add a node to the inventory as its agent. Returns the seconds until the next report is
        due."""
        body = plain(machine) | {"agent": agent}
        return self.call("POST", "/v1/nodes", body, new_key(), patience_s=patience_s)[1]["ttl_s"]

    def node(self, node: str) -> answers.NodeView:
        """The daemon's view of a node."""
        return self.call("GET", f"/v1/nodes/{quote(node, safe='')}")[1]

    def node_failed(self, node: str, reason: str) -> None:
        """Report that a node and all its state are lost."""
        # The reason may come from a check's output, and the daemon takes one line.
        body = {"reason": visible(" ".join(reason.split()), kept="")[:_LONGEST_REASON]}
        self.call("POST", f"/v1/nodes/{quote(node, safe='')}/failed", body, new_key())

    def _for_permit(
        self,
        permit: PhasePermit,
        action: str,
        body: Mapping[str, Any],
        patience_s: float | None,
        key: str | None = None,
    ) -> tuple[float, Any]:
        path = f"/v1/permits/{permit.token}/{action}"
        try:
            named = {"job": permit.job, **body}
            return self.call("POST", path, named, key or new_key(), patience_s=patience_s)
        except MuxError as error:
            if error.status in (404, 409):
                raise LeaseLostError(f"permit {permit.token} ({permit.phase}): {error}") from error
            raise
