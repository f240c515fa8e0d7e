"""The daemon's HTTP API as a job or a node sees it.

Every POST carries an idempotency key and is repeated with the same key until an answer comes, so
what was asked for happens once, whatever is lost on the way or restarted at the other end.
"""

from __future__ import annotations

import http.client
import json
import ssl
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rollpacker.rollmux.jobs import JobSpec, Phase

SAFE_SHARE = 0.9
"""Share of a lease in which its holder works: the rest is for clocks and for stopping."""
_WAIT_S = 20.0
_SOCKET_S = 10.0
_PAUSE_S = (0.05, 1.0)


class MuxError(RuntimeError):
    """The daemon refused; ``status`` and ``answer`` (its JSON object) say why."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer.get("error", f"HTTP status {status}")))
        self.status = status
        self.answer = answer
        self.code = str(answer.get("code", ""))


class UnreachableError(ConnectionError):
    """No answer came in time; what was asked for may or may not have happened."""


class LeaseLostError(RuntimeError):
    """The nodes may be another job's by now: stop, and ask for the phase again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """A lease of nodes for one phase.

    Args:
        token: fencing token; higher than every earlier one.
        phase: what it is for.
        nodes: where.
        stop_at: monotonic seconds after which nothing may run.
        lease_s: length of a whole lease.
    """

    token: int
    phase: Phase
    nodes: tuple[str, ...]
    stop_at: float
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Instead of a permit: load the job's state on other nodes first.

    Args:
        id: to be reported by ``moved``.
        rollout: its rollout nodes from now on.
        train: its training nodes.
        reason: ``repack``, ``guard``, or ``failure`` (the state has to come from a checkpoint).
    """

    id: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    reason: str


def new_key() -> str:
    """An idempotency key."""
    return uuid.uuid4().hex


class MuxClient:
    """Talks to one daemon; safe to share between threads.

    Args:
        url: of the daemon, ``http://127.0.0.1:8642``.
        token_file: holds the bearer token; nobody else may read it.
        patience_s: how long to go on asking when no answer comes.

    Raises ``ValueError`` for a wrong address or token file.
    """

    def __init__(self, url: str, token_file: str | Path, *, patience_s: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"mux.url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port
        self._token = _read_token(Path(token_file))
        self._patience_s = patience_s

    def submit(self, spec: JobSpec) -> None:
        """Register a job. Raises ``MuxError`` (409 when the id is taken)."""
        self._post("/v1/jobs", spec.to_json(), new_key())

    def job(self, job: str) -> dict[str, Any]:
        """The daemon's view of a job. Raises ``MuxError`` (404 when it knows none)."""
        return self._call("GET", f"/v1/jobs/{quote(job, safe='')}")[1]

    def status(self) -> dict[str, Any]:
        """Pools, groups, jobs and cost."""
        return self._call("GET", "/v1/status")[1]

    def timeline(self, window_s: float) -> list[dict[str, Any]]:
        """The phases of the last ``window_s`` seconds; see the daemon's ``/v1/timeline``."""
        return self._call("GET", f"/v1/timeline?window_s={window_s:g}")[1]["phases"]

    def permit(
        self, job: str, phase: Phase, key: str, *, wait_s: float = _WAIT_S
    ) -> Permit | Move | None:
        """Ask for a phase's nodes; None when it is not the job's turn yet: ask again, same key.

        The answer comes within ``wait_s``, at most 60.

        Raises ``MuxError`` when there is nothing to wait for; see its ``code``.
        """
        body = {"phase": phase, "wait_s": wait_s}
        path = f"/v1/jobs/{quote(job, safe='')}/permits"
        sent, answer = self._post(path, body, key, wait_s=wait_s)
        if not answer:
            return None
        if "move" in answer:
            return _move(answer["move"])
        return Permit(
            token=answer["token"],
            phase=answer["phase"],
            nodes=tuple(answer["nodes"]),
            stop_at=sent + SAFE_SHARE * answer["ttl_s"],
            lease_s=answer["lease_s"],
        )

    def heartbeat(self, permit: Permit) -> float:
        """Extend a lease; the new ``stop_at``. Raises ``LeaseLostError``."""
        patience = permit.stop_at - time.monotonic()
        sent, answer = self._for_permit(permit, "heartbeat", {}, patience)
        return sent + SAFE_SHARE * answer["ttl_s"]

    def finish(self, permit: Permit, seconds: float, key: str) -> dict[str, Any]:
        """The phase is over; ``seconds`` is what it took alone. Raises ``LeaseLostError``."""
        return self._for_permit(permit, "finish", {"seconds": seconds}, None, key)[1]

    def abandon(self, permit: Permit) -> None:
        """Give the nodes back with the phase unfinished; no harm when the lease is lost."""
        try:
            self._for_permit(permit, "abandon", {}, _SOCKET_S)
        except (LeaseLostError, UnreachableError):
            return

    def moved(self, job: str, move: Move, key: str | None = None) -> None:
        """The job's state is on its new nodes."""
        path = f"/v1/jobs/{quote(job, safe='')}/moved"
        self._post(path, {"move": move.id}, key or new_key())

    def end(self, job: str, *, patience_s: float | None = None) -> None:
        """The job is done or given up; its nodes are free."""
        self._post(f"/v1/jobs/{quote(job, safe='')}/end", {}, new_key(), patience_s=patience_s)

    def node_alive(self, node: str, *, patience_s: float | None = None) -> float:
        """Report a node; seconds in which to report again. Raises ``MuxError`` (410: failed)."""
        path = f"/v1/nodes/{quote(node, safe='')}/heartbeat"
        return float(self._post(path, {}, new_key(), patience_s=patience_s)[1]["ttl_s"])

    def node(self, node: str) -> dict[str, Any]:
        """The daemon's view of a node."""
        return self._call("GET", f"/v1/nodes/{quote(node, safe='')}")[1]

    def node_failed(self, node: str, reason: str) -> None:
        """Report that a node is gone, with all that was on it."""
        self._post(f"/v1/nodes/{quote(node, safe='')}/failed", {"reason": reason}, new_key())

    def _for_permit(
        self,
        permit: Permit,
        action: str,
        body: Mapping[str, Any],
        patience_s: float | None,
        key: str | None = None,
    ) -> tuple[float, dict[str, Any]]:
        path = f"/v1/permits/{permit.token}/{action}"
        try:
            return self._post(path, body, key or new_key(), patience_s=patience_s)
        except MuxError as error:
            if error.status in (404, 409):
                raise LeaseLostError(f"permit {permit.token} ({permit.phase}): {error}") from error
            raise

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        key: str,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> tuple[float, dict[str, Any]]:
        return self._call("POST", path, body, key, wait_s=wait_s, patience_s=patience_s)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> tuple[float, dict[str, Any]]:
        """The time just before the request that was answered was sent, and the answer."""
        patience = self._patience_s if patience_s is None else patience_s
        give_up = time.monotonic() + patience
        pause, longest = _PAUSE_S
        while True:
            sent = time.monotonic()
            left = give_up - sent
            try:
                timeout = wait_s + min(_SOCKET_S, max(0.1, left))
                status, answer = self._once(method, path, body, key, timeout)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if status < 300:
                    return sent, answer
                if status != 503:
                    raise MuxError(status, answer)
                problem = str(MuxError(status, answer))
            if time.monotonic() + pause >= give_up:
                raise UnreachableError(f"{self._host}:{self._port}{path}: {problem}")
            time.sleep(pause)
            pause = min(longest, 2 * pause)

    def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        key: str | None,
        timeout: float,
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        connection = self._connect(timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        return response.status, _parse(data)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)


def _parse(data: bytes) -> dict[str, Any]:
    """The answer's object. Raises ``HTTPException`` when it is none: no answer of the daemon's."""
    if not data:
        return {}
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise http.client.HTTPException(f"not JSON: {data[:80]!r}") from error
    if not isinstance(answer, dict):
        raise http.client.HTTPException(f"not a JSON object: {data[:80]!r}")
    return answer


def _move(answer: Mapping[str, Any]) -> Move:
    return Move(
        id=answer["id"],
        rollout=tuple(answer["rollout"]),
        train=tuple(answer["train"]),
        reason=answer["reason"],
    )


def _read_token(path: Path) -> str:
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"mux.token_file {path} can be read by others: chmod 600 {path}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"mux.token_file {path}: {error}") from error
    if not token:
        raise ValueError(f"mux.token_file {path} is empty")
    return token
