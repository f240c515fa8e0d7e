"""The daemon's HTTP API as a job or a node sees it."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollpacker.core.codec import load, plain
from rollpacker.core.types import Phase
from rollpacker.errors import visible
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.link import (
    SOCKET_S,
    DaemonLink,
    MuxError,
    UnreachableError,
    new_key,
)
from rollpacker.rollmux.service.http.token_file import seal, unseal

if TYPE_CHECKING:  # a job needs nothing that serves HTTP
    from rollpacker.rollmux.service.api import answers

SAFE_SHARE = 0.9
"""Share of a lease in which its holder works: the rest is for clocks and for stopping."""
_WAIT_S = 20.0
_LONGEST_REASON = 1000


class LeaseLostError(RuntimeError):
    """The nodes may be another job's by now: stop, and ask for the phase again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePermit:
    """A lease of nodes for one phase.

    Args:
        token: fencing token; higher than every earlier one.
        phase: what it is for.
        nodes: where.
        stop_at: monotonic seconds after which nothing may run.
        lease_s: length of a whole lease.
        job: whose it is.
    """

    token: int
    phase: Phase
    nodes: tuple[str, ...]
    stop_at: float
    lease_s: float
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Instead of a permit: load the job's state on other nodes first.

    Args:
        id: to be reported by ``moved``.
        rollout: its rollout nodes from now on.
        train: its training nodes.
        reason: ``repack``, ``guard``, ``drain``, ``resume`` (its nodes were taken back for another
            team) or ``failure`` (the state has to come from a checkpoint).
    """

    id: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGate:
    """Where the driver of an attempt lets the processes of its other nodes in.

    Args:
        key: that both sides show they know.
        names: by which each process is known, by its node's rank.
    """

    host: str
    port: int
    key: bytes
    names: Sequence[str]


def _about(job: str, attempt: int, host: str, port: int, names: Sequence[str]) -> str:
    return f"gate {job} {attempt} {host} {port} {' '.join(names)}"


class MuxClient(DaemonLink):
    """Talks to one daemon, as ``DaemonLink`` does: what a job or a node asks for, in calls."""

    def submit(self, spec: JobSpec) -> None:
        """Register a job. Raises ``MuxError`` (409: ``exists``, ``draining`` or ``too_large``)."""
        self.call("POST", "/v1/jobs", plain(spec), new_key())

    def job(self, job: str) -> answers.JobView:
        """The daemon's view of a job. Raises ``MuxError`` (404 when it knows none)."""
        return self.call("GET", f"/v1/jobs/{quote(job, safe='')}")[1]

    def status(self) -> answers.Status:
        """Pools, groups, jobs and cost."""
        return self.call("GET", "/v1/status")[1]

    def timeline(self, window_s: float) -> list[answers.PhaseRun]:
        """The phases of the last ``window_s`` seconds; see the daemon's ``/v1/timeline``."""
        found: answers.Timeline = self.call("GET", f"/v1/timeline?window_s={window_s:g}")[1]
        return found["phases"]

    def permit(
        self, job: str, phase: Phase, key: str, *, wait_s: float = _WAIT_S
    ) -> PhasePermit | MoveOrder | None:
        """Ask for a phase's nodes; None when it is not the job's turn yet: ask again, same key.

        The answer comes within ``wait_s``, at most 60.

        Raises ``MuxError`` when there is nothing to wait for; see its ``code``.
        """
        body = {"phase": phase, "wait_s": wait_s}
        path = f"/v1/jobs/{quote(job, safe='')}/permits"
        answer: answers.PermitView | answers.Moving | None
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

        Returns:
            The new ``stop_at``, and whether another job has the nodes of a rollout's tail.
        """
        patience = permit.stop_at - time.monotonic()
        answer: answers.BeatAnswer
        sent, answer = self._for_permit(permit, "heartbeat", {}, patience)
        return sent + SAFE_SHARE * answer["ttl_s"], answer["release_tail"]

    def tail(self, job: str, permit: PhasePermit) -> bool:
        """Report that most responses of a running rollout are there. Raises ``LeaseLostError``.

        True when another job has the nodes: what is left has to move to a quarter of the workers.
        """
        path = f"/v1/jobs/{quote(job, safe='')}/tail"
        try:
            told: answers.TailTold
            _, told = self.call("POST", path, {"token": permit.token}, new_key())
            return told["release_tail"]
        except MuxError as error:
            raise LeaseLostError(f"permit {permit.token} ({permit.phase}): {error}") from error

    def finish(self, permit: PhasePermit, seconds: float, key: str) -> answers.DoneAnswer:
        """The phase is over; ``seconds`` is what it took alone. Raises ``LeaseLostError``."""
        return self._for_permit(permit, "finish", {"seconds": seconds}, None, key)[1]

    def abandon(self, permit: PhasePermit) -> None:
        """Give the nodes back with the phase unfinished; no harm when the lease is lost."""
        try:
            self._for_permit(permit, "abandon", {}, SOCKET_S)
        except (LeaseLostError, UnreachableError):
            return

    def moved(self, job: str, move: MoveOrder, key: str | None = None) -> None:
        """The job's state is on its new nodes."""
        path = f"/v1/jobs/{quote(job, safe='')}/moved"
        self.call("POST", path, {"move": move.id}, key or new_key())

    def end(self, job: str, *, patience_s: float | None = None) -> None:
        """The job is done or given up; its nodes are free."""
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
        """Report a node, with the programs that are there where its agent starts some.

        Args:
            agent: its identity.

        Returns:
            The time just before the request was sent, and the answer.

        Raises ``MuxError`` (410: failed; 409, ``taken``: another agent reports it).
        """
        path = f"/v1/nodes/{quote(node, safe='')}/heartbeat"
        body = {"attempts": attempts, "agent": agent}
        return self.call("POST", path, body, new_key(), patience_s=patience_s)

    def printed(
        self, job: str, number: int, at: int, data: bytes, *, patience_s: float | None = None
    ) -> tuple[int, bool]:
        """Send what an attempt printed from byte ``at`` on; how much the daemon has of it, and
        whether it takes no more."""
        path = f"/v1/jobs/{quote(job, safe='')}/attempts/{number}/log"
        body = {"at": at, "data": base64.b64encode(data).decode()}
        answer: answers.PrintedAnswer
        _, answer = self.call("POST", path, body, new_key(), patience_s=patience_s)
        return answer["have"], answer["full"]

    def open_gate(
        self, job: str, attempt: int, host: str, port: int, key: bytes, names: Sequence[str]
    ) -> None:
        """Say where the driver of the job's running attempt is; see ``gate``."""
        sealed = seal(key, self.token, _about(job, attempt, host, port, names))
        body = {"host": host, "port": port, "key": sealed, "names": [*names]}
        self.call("POST", f"/v1/jobs/{quote(job, safe='')}/gate", body, new_key())

    def gate(self, job: str, attempt: int) -> DriverGate:
        """Where the driver of an attempt is.

        Raises ``MuxError`` (404, ``no_gate``: not yet), ``ValueError`` where the driver has another
        token.
        """
        path = f"/v1/jobs/{quote(job, safe='')}/gate?attempt={attempt}"
        found = self.call("GET", path)[1]
        host, port, names = found["host"], found["port"], found["names"]
        try:
            key = unseal(found["key"], self.token, _about(job, attempt, host, port, names))
        except ValueError as error:
            raise ValueError(
                f"job {job}: its driver, at {host}:{port}, has another token than this node: "
                "agents on whose nodes one job runs need the same one (--token-file)"
            ) from error
        return DriverGate(host=host, port=port, key=key, names=names)

    def register(
        self, machine: Machine, *, agent: str = "", patience_s: float | None = None
    ) -> float:
        """Join the inventory with a node, as its agent; seconds in which to report it again."""
        body = plain(machine) | {"agent": agent}
        answer: answers.Registered
        _, answer = self.call("POST", "/v1/nodes", body, new_key(), patience_s=patience_s)
        return answer["ttl_s"]

    def node(self, node: str) -> answers.NodeView:
        """The daemon's view of a node."""
        return self.call("GET", f"/v1/nodes/{quote(node, safe='')}")[1]

    def node_failed(self, node: str, reason: str) -> None:
        """Report that a node is gone, with all that was on it."""
        # Of a check's own words: the daemon takes one line.
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
