"""Agents: one at a time of a node, heard in time whatever they do, never silent for ever."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mux_real_daemon import COMMAND, Daemon, free_port
from test_mux_programs import INVENTORY, until

from rollpacker.rollmux.node import agent as agents
from rollpacker.rollmux.node.agent import NodeAgent, folder_identity, identity
from rollpacker.rollmux.node.programs import NodePrograms
from rollpacker.rollmux.service.client.client import MuxClient, MuxError, UnreachableError

PRINTS = f"{sys.executable} -c print('x'*100000)"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "nodes.yaml").write_text(INVENTORY, encoding="utf-8")
    running = Daemon(folder, first=("--inventory", str(folder / "nodes.yaml")))
    yield running
    running.stop()


def start(daemon: Daemon, node: str, folder: Path) -> subprocess.Popen[str]:
    words = ["--url", daemon.url, "--token-file", str(daemon.token_file), "--node", node]
    command = [*COMMAND, "mux", "agent", *words, "--programs", str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_second_agent_of_a_node_is_refused_and_says_so(daemon: Daemon, tmp_path: Path) -> None:
    """Both ran every program of the node, at once."""
    first = start(daemon, "roll-0", tmp_path / "one")
    try:
        until(lambda: daemon.client().node("roll-0")["agent"])
        for folder, code, why in (
            ("two", 1, "node roll-0: another agent reported it "),
            ("one", 2, f"--programs {tmp_path / 'one'}: another agent uses this folder"),
        ):
            _, said = (second := start(daemon, "roll-0", tmp_path / folder)).communicate(timeout=60)
            assert (second.returncode, "Traceback" in said) == (code, False)
            assert why in said
        assert first.poll() is None
        first.kill()
        first.wait()
        # The one before, started again, is not taken for another.
        first = start(daemon, "roll-0", tmp_path / "one")
        lease = tmp_path / "one" / "lease"
        before = lease.read_text()
        until(lambda: lease.read_text() != before)
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def test_who_an_agent_is_lasts_as_long_as_its_folder(tmp_path: Path) -> None:
    mine, held = folder_identity(tmp_path / "a")
    assert mine != folder_identity(tmp_path / "b")[0]
    os.close(held)
    again, held = folder_identity(tmp_path / "a")
    assert again == mine
    os.close(held)
    (tmp_path / "a" / "agent").write_text("cut off")
    assert len(folder_identity(tmp_path / "a")[0]) == 32
    assert identity(None) == identity(None)


class Told(MuxClient):
    """A daemon that wants one program on the node, and keeps what it is told."""

    def __init__(self, command: str = "true", take: Callable[[], Any] = lambda: None) -> None:
        self.beats = 0
        self._take = take
        self.codes: list[int | None] = []
        self.log = b""
        program = {"command": command.split()}
        place = {"rank": 0, "nodes": ["node"], "stop": False}
        self._wanted = [{"job": "job", "number": 1, "program": program, **place}]

    def node_alive(
        self,
        node: str,
        attempts: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent: str = "",
        patience_s: float | None = None,
    ) -> tuple[float, dict[str, Any]]:
        self.beats += 1
        self.codes.extend(each["code"] for each in attempts or ())
        if any(code is not None for code in self.codes):
            self._wanted = []
        return agents.time.monotonic(), {"ttl_s": 1.0, "attempts": self._wanted}

    def printed(
        self, job: str, number: int, at: int, data: bytes, *, patience_s: float | None = None
    ) -> tuple[int, bool]:
        self._take()
        self.log = self.log[:at] + data
        return len(self.log), False

    def node_failed(self, node: str, reason: str) -> None:
        pass

    def heard(self, times: int = 5) -> None:
        """So often from here on."""
        beats = self.beats
        until(lambda: self.beats >= beats + times, 10.0)


@contextmanager
def running(
    client: MuxClient, folder: Path, node: str = "node", **more: Any
) -> Iterator[Callable[[], list[str | None]]]:
    agent = NodeAgent(client, node, programs=NodePrograms(folder, {}), retry_s=0.05, **more)
    ended: list[str | None] = []
    thread = threading.Thread(target=lambda: ended.append(agent.run()))
    thread.start()
    yield lambda: ended
    agent.stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_REPORT_S", 0.05)
    monkeypatch.setattr(agents, "_PAUSE_S", 0.05)


def test_a_log_that_is_sent_slowly_keeps_no_report_waiting(tmp_path: Path) -> None:
    """It cost the node its lease."""
    stuck, go = threading.Event(), threading.Event()

    def slow() -> None:
        stuck.set()
        assert go.wait(30)

    client = Told(PRINTS, slow)
    with running(client, tmp_path):
        assert stuck.wait(30)
        client.heard()
        assert set(client.codes) == {None}, "its log is not there"
        go.set()
        until(lambda: 0 in client.codes)
        assert client.log == b"x" * 100_000 + b"\n"


def test_a_log_that_could_not_be_taken_once_is_sent_later(tmp_path: Path) -> None:
    """Whatever went wrong, no more of it was ever sent."""
    answers = [500, 500, 429]

    def full() -> None:
        if answers:
            raise MuxError(answers.pop(), {})

    client = Told(PRINTS, full)
    with running(client, tmp_path):
        until(lambda: 0 in client.codes)
        assert client.log == b"x" * 100_000 + b"\n"


@pytest.mark.parametrize("status", [404, 500])
def test_an_attempt_is_over_though_its_log_is_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(agents, "_STUCK_S", 0.5 if status == 500 else 1000.0)
    tried = list[int]()

    def never() -> None:
        tried.append(1)
        raise MuxError(status, {})

    client = Told(PRINTS, never)
    with running(client, tmp_path):
        until(lambda: 0 in client.codes)
    assert (len(tried) == 1) == (status == 404)


def test_a_check_that_takes_long_keeps_no_report_waiting(tmp_path: Path) -> None:
    checks, go = list[int](), threading.Event()

    def healthy() -> str | None:
        checks.append(1)
        if len(checks) == 1:
            return None
        assert go.wait(30)
        return "on fire"

    client = Told()
    with running(client, tmp_path, healthy=healthy) as ended:
        until(lambda: len(checks) == 2, 10.0)
        client.heard()
        go.set()
        until(lambda: ended() == ["on fire"])


def test_a_check_that_fails_itself_is_a_problem(tmp_path: Path) -> None:
    def healthy() -> str | None:
        raise OSError("no such tool")

    with running(Told(), tmp_path, healthy=healthy) as ended:
        until(lambda: ended() == ["the health check failed: OSError: no such tool"])


def test_an_agent_says_once_that_the_inventory_lacks_its_node(
    daemon: Daemon, tmp_path: Path
) -> None:
    """It waited silently, for ever."""
    said: list[str] = []

    class Counting(MuxClient):
        beats = 0

        def node_alive(self, *given: Any, **more: Any) -> tuple[float, dict[str, Any]]:
            Counting.beats += 1
            return super().node_alive(*given, **more)

    client = Counting(daemon.url, daemon.token_file)
    with running(client, tmp_path, "roll-7", say=said.append):
        until(lambda: Counting.beats > 3)
        assert said == [
            "the inventory has no node 'roll-7'; "
            "list it there, or pass --pool here so that it joins"
        ]
        machine = {"name": "roll-7", "pool": "rollout", "memory_gb": 4.0, "devices": 1}
        daemon.client().call("POST", "/v1/nodes", machine, "joins")
        until(lambda: said[1:] == ["node roll-7: the daemon knows it now"])


SIGNALLED = """
import os, signal, threading
from rollpacker.cli.mux.agent import _report

class Reporter:
    stop = threading.Event()

    def run(self):
        with self.stop._cond:  # as at the beginning and the end of a wait
            os.kill(os.getpid(), signal.SIGTERM)
        self.stop.wait()

_report(Reporter(), "node")
"""


def test_a_signal_ends_an_agent_whatever_it_is_about() -> None:
    subprocess.run([sys.executable, "-c", SIGNALLED], check=True, timeout=60)


def test_an_agent_says_what_happens_on_its_node(tmp_path: Path) -> None:
    said: list[str] = []

    class Leaving(Told):
        away = False

        def node_alive(self, *given: Any, **more: Any) -> tuple[float, dict[str, Any]]:
            if self.away:
                raise UnreachableError("head: refused")
            return super().node_alive(*given, **more)

    client = Leaving("false")
    with running(client, tmp_path, say=said.append):
        until(lambda: len(said) == 3)
        client.away = True
        until(lambda: len(said) == 4)
        client.away = False
        until(lambda: len(said) == 5)
    known = "node node: the daemon knows it now"
    assert said == [
        known,
        "job job: attempt 1 is started",
        "job job: attempt 1 has ended with code 1",
        "node node: the daemon does not answer, so its programs are frozen until then: "
        "head: refused",
        known,
    ]


def test_an_agent_says_once_that_no_daemon_answers(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_FIRST_S", 0.1)
    said: list[str] = []
    url = f"http://127.0.0.1:{free_port()}"
    with running(MuxClient(url, daemon.token_file), tmp_path, say=said.append):
        until(lambda: said)
        threading.Event().wait(0.4)
    (text,) = said
    assert text.startswith("waiting for the daemon at --url: 127.0.0.1:")


def test_an_agent_lives_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    full = threading.Event()
    renew = NodePrograms.renew

    def renewed(programs: NodePrograms, stop_at: float) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        renew(programs, stop_at)

    monkeypatch.setattr(NodePrograms, "renew", renewed)
    full.set()
    with running(Told("false"), tmp_path, say=said.append) as ended:
        until(lambda: any("frozen until the agent can write its lease" in text for text in said))
        assert ended() == []
        full.clear()
        until(lambda: "node node: its lease is written again" in said)
    assert ended() == [None]
