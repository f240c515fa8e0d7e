"""What is left of programs whose agents or keepers were killed, or stood still."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from mux_real_daemon import Daemon
from test_mux_programs import INVENTORY, keepers, until

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.node import keeper
from rollpacker.rollmux.node.agent import NodeAgent
from rollpacker.rollmux.node.programs import AttemptName, NodePrograms
from rollpacker.rollmux.service.client.client import MuxClient

FIRST = AttemptName("job", 1)
SLEEP = "import time; time.sleep(1000)"
DAEMON = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
{SLEEP}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in keepers(tmp_path):
        process.kill()
    for name in tmp_path.glob("*.*"):
        keeper.send(keeper.marked(str(name)), signal.SIGKILL)


def wanted(*command: str, number: int = 1, stop: bool = False) -> dict[str, Any]:
    program = {"command": list(command), "stop_s": 0.5}
    place = {"rank": 0, "nodes": ["node"]}
    return {"job": "job", "number": number, "program": program, "stop": stop, **place}


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def codes(programs: NodePrograms) -> list[int | None]:
    return [each["code"] for each in programs.seen()]


def ours(programs: NodePrograms) -> None:
    programs.renew(time.monotonic() + 100.0)


def running(folder: Path, count: int) -> bool:
    return len(keeper.marked(str(folder / str(FIRST)))) == count


def test_what_a_program_left_behind_ends_with_it_though_its_keeper_was_killed(
    folder: Path,
) -> None:
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(DAEMON))])
    ours(programs)
    until(lambda: running(folder, 2))
    (process,) = keepers(folder)
    process.kill()
    until(lambda: codes(programs) == [137])
    assert running(folder, 0)
    programs.settle([])
    assert programs.seen() == []


def killed_before_it_starts(folder: Path) -> None:
    """An agent that has written down what to start."""
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr("subprocess.Popen", lambda *_, **__: sys.exit())
        with pytest.raises(SystemExit):
            NodePrograms(folder, {}).settle([wanted(*python(SLEEP))])


def test_an_agent_starts_what_the_one_before_was_killed_over(folder: Path) -> None:
    """It had written down what to start, and no more."""
    killed_before_it_starts(folder)
    programs = NodePrograms(folder, {})
    assert codes(programs) == [None]
    programs.settle([wanted(*python(SLEEP))])
    ours(programs)
    until(lambda: running(folder, 1))
    assert codes(programs) == [None]
    # One that comes after it finds it, too, and a keeper that is started twice lets go.
    again = NodePrograms(folder, {})
    assert codes(again) == [None]
    again.settle([])
    until(lambda: not keepers(folder))
    again.settle([])
    assert again.seen() == []


def test_what_was_never_started_and_is_to_stop_is_over(folder: Path) -> None:
    killed_before_it_starts(folder)
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(SLEEP), stop=True)])
    assert codes(programs) == [143]
    # The late one of the agent that was killed.
    subprocess.run([sys.executable, keeper.__file__, folder / str(FIRST)], check=True)
    assert not (folder / str(FIRST) / "log").exists()
    programs.settle([])
    assert programs.seen() == []


def test_what_is_to_stop_and_is_not_here_is_over(folder: Path) -> None:
    """The answer that asked to start it was lost, and its job has moved meanwhile."""
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(SLEEP), stop=True)])
    (told,) = programs.seen()
    assert told == {"job": "job", "number": 1, "code": 143, "stopped": True}
    programs.settle([])
    assert programs.seen() == []


def test_the_next_attempt_starts_when_nothing_of_the_one_before_is_left(folder: Path) -> None:
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(SLEEP))])
    ours(programs)
    until(lambda: running(folder, 1))
    (process,) = keepers(folder)
    process.suspend()
    second = [wanted(*python(SLEEP), number=2)]
    programs.settle(second)
    assert [each["number"] for each in programs.seen()] == [1]
    process.resume()
    until(lambda: programs.settle(second) or [e["number"] for e in programs.seen()] == [2])
    assert running(folder, 0)


def test_nothing_starts_on_a_node_that_is_not_ours(folder: Path) -> None:
    """The agent stood still with the answer in its hands: the program may be elsewhere by now."""
    programs = NodePrograms(folder, {})
    programs.renew(time.monotonic() - 1.0)
    programs.settle([wanted(*python(SLEEP))])
    until(lambda: (folder / str(FIRST) / "log").exists())
    time.sleep(0.5)
    assert running(folder, 0)
    programs.stop_all()
    until(lambda: codes(programs) == [143])
    assert programs.seen()[0]["stopped"] is True


def test_a_node_has_failed_when_nothing_runs_there_any_more(folder: Path) -> None:
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(SLEEP))])
    ours(programs)
    until(lambda: running(folder, 1))
    seen: list[bool] = []

    class Deaf(MuxClient):
        def __init__(self) -> None:
            """Needs no daemon."""

        def node_failed(self, node: str, reason: str) -> None:
            seen.append(running(folder, 0))

    agent = NodeAgent(Deaf(), "a", healthy=lambda: "broken", programs=programs)
    assert agent.run() == "broken"
    assert seen == [True]


def test_a_daemon_that_stood_still_gives_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(INVENTORY, encoding="utf-8")
    daemon = Daemon(tmp_path, ttl=2.0, first=("--inventory", str(tmp_path / "nodes.yaml")))
    try:
        client = daemon.client()
        client.register(Machine(name="roll-0", pool="rollout", memory_gb=4))
        assert daemon.process is not None
        assert daemon.process.pid is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        time.sleep(1.5 * daemon.ttl)
        os.kill(daemon.process.pid, signal.SIGCONT)
        client.node_alive("roll-0")
        assert client.node("roll-0")["status"] == "open"
        until(lambda: client.node("roll-0")["status"] == "down")
    finally:
        daemon.stop()


def test_a_request_that_did_not_arrive_whole_is_sent_again(tmp_path: Path) -> None:
    statuses = [408, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()
            self.wfile.write(json.dumps({"id": "a"}).encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 43)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert MuxClient(url, token, patience_s=30.0).job("a") == {"id": "a"}
    finally:
        server.shutdown()
        server.server_close()


def test_marks_are_of_live_processes_only() -> None:
    assert keeper.marked("/no/such/attempt") == []
    assert psutil.Process().environ().get(keeper.MARK) is None


def test_a_lease_that_cannot_be_read_for_a_moment_is_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as over since the machine was started, so the program was killed."""
    hasty = folder / "hasty" / "node" / "keeper.py"
    hasty.parent.mkdir(parents=True)
    source = Path(keeper.__file__).read_text(encoding="utf-8")
    hasty.write_text(source.replace("GIVE_UP_S = 3600.0", "GIVE_UP_S = 20.0"), encoding="utf-8")
    monkeypatch.setattr(keeper, "__file__", str(hasty))
    programs = NodePrograms(folder, {})
    programs.settle([wanted(*python(SLEEP))])
    lease = folder / "lease"
    programs.renew(time.monotonic() + 1.5)
    until(lambda: running(folder, 1))
    lease.rename(folder / "aside")
    lease.mkdir()
    # It lasts no longer than the one before, all the same.
    until(lambda: frozen(folder) == [True])
    lease.rmdir()
    ours(programs)
    until(lambda: frozen(folder) == [False])
    assert codes(programs) == [None]


def frozen(folder: Path) -> list[bool]:
    pids = keeper.marked(str(folder / str(FIRST)))
    return [psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids]


def test_an_end_that_cannot_be_written_for_a_moment_is_written_later(folder: Path) -> None:
    """The disk was full: a program that was done counted as killed, and was started again."""
    programs, taken = NodePrograms(folder, {}), folder / str(FIRST) / "exit.new"
    programs.settle([wanted(*python(f"import os; os.mkdir({str(taken)!r})"))])
    ours(programs)
    until(taken.is_dir)
    until(lambda: not running(folder, 1))
    time.sleep(3 * keeper.POLL_S)
    taken.rmdir()
    until(lambda: codes(programs) == [0])


def test_what_the_disk_has_no_room_for_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = NodePrograms(folder, {})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert programs.settle([wanted("true")]) == []
    assert codes(programs) == [keeper.NOT_STARTED]
    assert not programs.folder(FIRST).exists()
    assert programs.settle([]) == []
    assert codes(programs) == []


def test_a_log_keeps_its_end_and_its_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LOG_KEPT", 2**20)
    (tmp_path / "program.json").write_text("{}")
    log = tmp_path / "log"
    log.write_bytes(b"x" * 3 * 2**20 + b"end")
    keeper.ProgramSupervisor(str(tmp_path))._cap_log()
    assert log.stat().st_size in (3 * 2**20 + 3, 0)  # zero on a file system without holes
    assert log.stat().st_blocks * 512 < 2 * 2**20
    assert log.read_bytes()[-3:] in (b"end", b"")
