"""A node's agent: reports the node, starts and stops programs of jobs, and sends their logs.

Its identity lets the daemon tell two agents with the same node name apart. It belongs to the locked
program folder, or to the machine until its next boot, so a restarted agent keeps it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.core.codec import load
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.node.programs import AttemptName, NodePrograms
from rollpacker.rollmux.service.client.client import (
    SAFE_SHARE,
    MuxClient,
    MuxError,
    UnreachableError,
)
from rollpacker.rollmux.service.state.clock import boot_id

_FILE = "agent"
_FORM = re.compile(r"[0-9a-f]{32}")


def identity(programs: Path | None) -> str:
    """Identity of this agent. Raises ``ValueError`` if another agent has the folder."""
    if programs is None:
        return boot_id().replace("-", "") or secrets.token_hex(16)
    return folder_identity(programs)[0]


def folder_identity(folder: Path) -> tuple[str, int]:
    """Lock a folder. Returns its identity, and the descriptor that holds the lock.

    Raises ``ValueError`` if another agent has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        taken = "another agent uses this folder: stop it, or name another folder"
        why = taken if isinstance(error, BlockingIOError) else f"it cannot be locked: {error}"
        raise ValueError(f"--programs {folder}: {why}") from error
    found = os.pread(handle, 64, 0).decode("ascii", "replace").strip()
    if not _FORM.fullmatch(found):
        found = secrets.token_hex(16)
        os.ftruncate(handle, 0)
        os.pwrite(handle, found.encode() + b"\n", 0)
        os.fsync(handle)
    return found, handle


_PIECE = 24 * 1024
_PIECES = 16  # most pieces of one attempt in a row, so that other logs get their turn
_PAUSE_S = 5.0  # seconds before a retry if the daemon refused a piece
_STUCK_S = 60.0
"""After so many seconds without progress, an attempt's end does not wait for its log."""
_UNKNOWN_OR_GONE = (404, 410)


@dataclass(slots=True)
class _Log:
    """Progress of sending an attempt's log.

    Args:
        over: whether the daemon takes no more of it.
        failed: first failure since the last success (None if there is none).
        again: time of the next try.
    """

    sent: int = 0
    over: bool = False
    failed: float | None = None
    again: float = 0.0


class Printing:
    """Sends the logs of a node's attempts in a thread, so that they never delay its reports."""

    def __init__(self, client: MuxClient, programs: NodePrograms) -> None:
        self._client = client
        self._programs = programs
        self._logs: dict[AttemptName, _Log] = {}  # replaced as a whole, and only by `follow`
        self._look = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="printing", daemon=True)

    def follow(self, names: set[AttemptName]) -> None:
        self._logs = {name: self._logs.get(name) or _Log() for name in sorted(names)}
        self._look.set()
        if names and self._thread.ident is None:
            self._thread.start()

    def sent(self, name: AttemptName) -> bool:
        """Whether the daemon has the whole log, or never will."""
        log, path = self._logs[name], self._programs.log(name)
        stuck = log.failed is not None and time.monotonic() > log.failed + _STUCK_S
        return log.over or stuck or not path.exists() or log.sent >= path.stat().st_size

    def close(self) -> None:
        self._closed = True
        self._look.set()

    def _run(self) -> None:
        while not self._closed:
            self._look.wait()
            self._look.clear()
            while not self._closed and self._send_some():
                continue

    def _send_some(self) -> bool:
        more = [self._send(name, log) for name, log in self._logs.items()]
        return any(more)

    def _send(self, name: AttemptName, log: _Log) -> bool:
        if log.over or time.monotonic() < log.again:
            return False
        try:
            with self._programs.log(name).open("rb") as file:
                file.seek(log.sent)
                for _ in range(_PIECES):
                    data = file.read(_PIECE)
                    if not data or self._closed:
                        return False
                    log.sent, log.over = self._client.printed(
                        name.job, name.number, log.sent, data, patience_s=_PAUSE_S
                    )
                    log.failed = None
                    file.seek(log.sent)
        except FileNotFoundError:  # not there yet, or not any more
            return False
        except Exception as error:
            # Only an unknown job's log is over. Any other error may pass.
            log.over = isinstance(error, MuxError) and error.status in _UNKNOWN_OR_GONE
            log.failed = time.monotonic() if log.failed is None else log.failed
            log.again = time.monotonic() + _PAUSE_S
            return False
        return not log.over


_CHECK_TIMEOUT_S = 30.0
_REPORT_S = 1.0
"""Seconds between two reports of an agent that starts programs. Submitters wait for them."""
_KILL_S = 10.0  # seconds to wait for the end of killed programs
_FIRST_S = 5.0  # seconds to wait for the first answer before printing a message
_GONE = 410
_UNKNOWN = 404


class NodeAgent:
    """Reports one node until it fails or ``stop`` is set.

    If the daemon is silent for a lease, the node's programs are frozen until it answers
    (``keeper``), since it may have given the node up.

    Args:
        healthy: returns None while the node works, else its problem.
        on_failed: stops everything else on the node. Called once, when either side gives up.
        retry_s: pause in seconds while the daemon does not use the node.
        machine: description with which the node joins the inventory (None in a cloud).
        identity: lets the daemon tell this agent from another of the same name (empty if unknown).
    """

    def __init__(
        self,
        client: MuxClient,
        node: str,
        *,
        healthy: Callable[[], str | None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
        retry_s: float = 5.0,
        machine: Machine | None = None,
        programs: NodePrograms | None = None,
        identity: str = "",
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._client = client
        self._node = node
        self._on_failed = on_failed
        self._retry_s = retry_s
        self._machine = machine
        self._joins = machine is not None
        self._programs = programs
        self._printing = None if programs is None else Printing(client, programs)
        self._identity = identity
        self._say = say
        self._said = "new"  # the last trouble that was logged ("new" at first)
        self._over = set[AttemptName]()
        self._ttl_s: float | None = None
        """Seconds of the daemon's lease (None while it does not count on this node)."""
        self._check = _Check(healthy)
        self.stop = threading.Event()

    def run(self) -> str | None:
        """Report until stopped (None) or until the node has failed (why).

        Raises ``MuxError`` on a refusal, with code ``taken`` if another agent reports the node.
        """
        try:
            return self._run()
        finally:
            if self._printing is not None:
                self._printing.close()

    def _run(self) -> str | None:
        while not self.stop.is_set():
            problem = self._check.problem(self._ttl_s)
            if problem is not None:
                self._give_up()
                self._see_it_end()
                self._report(problem)
                return problem
            try:
                pause = self._beat()
            except MuxError as error:
                if error.status == _GONE:
                    if self._rejoined():
                        continue
                    self._give_up()
                    return "the daemon has given it up"
                if error.status != _UNKNOWN:
                    if error.code == "taken" and self._ttl_s is not None:
                        # Another agent may start this node's programs by now.
                        self._give_up()
                    raise
                pause = self._not_in_use(error)
            except UnreachableError as error:
                self._away(error)
                continue
            self.stop.wait(pause)
        return None

    def _tell(self, trouble: str, text: str) -> None:
        if trouble != self._said:
            self._said = trouble
            self._say(text)

    def _away(self, error: UnreachableError) -> None:
        if self._ttl_s is None:
            self._tell("away", f"waiting for the daemon at --url: {error}")
        else:
            ours = "" if self._programs is None else ", so its programs are frozen until then"
            self._tell("away", f"node {self._node}: the daemon does not answer{ours}: {error}")

    def _well(self) -> None:
        if self._said:
            self._said = ""
            self._say(f"node {self._node}: the daemon knows it now")

    def _beat(self) -> float:
        if self._joins and self._machine is not None:
            self._ttl_s = self._register(self._machine)
            self._joins = False
            self._well()
            return 0.0
        # The daemon does not count on this node before its first answer, so there is no hurry.
        told = None if self._programs is None else self._attempts(self._programs)
        sent, answer = self._client.node_alive(
            self._node, told, agent=self._identity, patience_s=self._ttl_s or _FIRST_S
        )
        self._ttl_s = ttl_s = answer["ttl_s"]
        if self._said != "disk":
            self._well()
        if self._programs is None:
            return ttl_s / 3
        if time.monotonic() >= sent + SAFE_SHARE * ttl_s:
            return 0.0  # this process stood still, so the answer may be out of date
        assert "attempts" in answer
        try:
            for name in self._programs.settle(answer["attempts"]):
                self._say(f"job {name.job}: attempt {name.number} is started")
            # Renew last, so that unwanted programs do not continue.
            self._programs.renew(sent + SAFE_SHARE * ttl_s)
        except OSError as error:
            # Only the keepers' lease expires; the node itself is healthy.
            frozen = "its programs are frozen until the agent can write its lease"
            self._tell("disk", f"node {self._node}: {frozen}: {error}")
        else:
            if self._said == "disk":
                self._tell("", f"node {self._node}: its lease is written again")
        return min(ttl_s / 3, _REPORT_S)

    def _rejoined(self) -> bool:
        """Register a failed node again from the inventory, if this agent has not reported yet."""
        if self._ttl_s is not None or self._machine is not None:
            return False
        listed = self._client.node(self._node).get("machine")
        if listed is None:
            return False
        self._ttl_s = self._register(load(listed, Machine))
        return True

    def _register(self, machine: Machine) -> float:
        return self._client.register(machine, agent=self._identity, patience_s=_FIRST_S)

    def _attempts(self, programs: NodePrograms) -> list[Mapping[str, Any]]:
        """Report the attempts here. One counts as over only when its log has been sent too."""
        assert self._printing is not None
        found = programs.seen()
        names = [AttemptName(each["job"], each["number"]) for each in found]
        self._printing.follow(set(names))
        self._tell_ends(names, found)
        told: list[Mapping[str, Any]] = []
        for name, each in zip(names, found, strict=True):
            over = each["code"] is None or self._printing.sent(name)
            told.append(each if over else {**each, "code": None})
        return told

    def _tell_ends(self, names: Sequence[AttemptName], found: Sequence[dict[str, Any]]) -> None:
        over = {name: each["code"] for name, each in zip(names, found, strict=True)}
        over = {name: code for name, code in over.items() if code is not None}
        for name in sorted(over.keys() - self._over):
            self._say(f"job {name.job}: attempt {name.number} has ended with code {over[name]}")
        self._over = {*over}

    def _not_in_use(self, why: MuxError) -> float:
        """The daemon does not use the node: not yet, not any more, or removed."""
        unlisted = "list it there, or pass --pool here so that it joins"
        hint = unlisted if why.code == "unlisted" else "the agent reports it as soon as it is"
        self._tell(why.code, f"{why}; {hint}")
        self._ttl_s = None
        self._joins = self._machine is not None
        if self._programs is not None:
            self._programs.settle(())
        return self._retry_s

    def _give_up(self) -> None:
        if self._programs is not None:
            self._programs.stop_all()
        self._on_failed()

    def _see_it_end(self) -> None:
        """Wait for the end of the programs: the daemon restarts them elsewhere after the report."""
        end = time.monotonic() + _KILL_S
        while self._programs is not None and time.monotonic() < end:
            if all(each["code"] is not None for each in self._programs.seen()):
                return
            time.sleep(0.1)

    def _report(self, problem: str) -> None:
        try:
            self._client.node_failed(self._node, problem)
        except UnreachableError:
            return
        except MuxError as error:
            if error.status not in (_GONE, _UNKNOWN):
                raise


class _Check:
    """Checks a node a few times per lease in a thread, since a check may take long."""

    def __init__(self, healthy: Callable[[], str | None]) -> None:
        self._healthy = healthy
        self._began = -float("inf")
        self._running: threading.Thread | None = None
        self._found: str | None = None

    def problem(self, ttl_s: float | None) -> str | None:
        """Result of the last check. Before the daemon counts on the node, wait for the check."""
        if ttl_s is None:
            self._look()
        elif self._running is not None and self._running.is_alive():
            return None
        elif time.monotonic() - self._began >= ttl_s / 3:
            self._running = threading.Thread(target=self._look, name="check", daemon=True)
            self._running.start()
        return self._found

    def _look(self) -> None:
        self._began = time.monotonic()
        try:
            self._found = self._healthy()
        except Exception as error:
            self._found = f"the health check failed: {type(error).__name__}: {error}"


def check_command(command: Sequence[str]) -> str | None:
    """Run a health check. Returns None if it exits with 0 in time, else its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"{command[0]} exited with {done.returncode}: {said[-1] if said else 'no output'}"
