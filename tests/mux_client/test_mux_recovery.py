"""Killed daemons, jobs and agents: no phase is lost and none is counted twice."""

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from mux_real_daemon import COMMAND, Daemon, background, lines

from rollpacker.rollmux.node.agent import NodeAgent, check_command
from rollpacker.rollmux.service.client.client import LeaseLostError
from rollpacker.rollmux.service.client.phase import Phases, StateLostError

# Real kills, and leases of seconds that have to run out.
pytestmark = pytest.mark.slow


def test_a_killed_daemon_goes_on_where_it_was(tmp_path: Path) -> None:
    """Leases are longer than the daemon is away, so nobody stops."""
    daemon = Daemon(tmp_path, ttl=60.0)
    order: list[str] = []
    inside = threading.Event()

    def run(phases: Phases) -> None:
        for _ in range(3):
            for name in ("rollout", "train"):
                with phases.phase(name):
                    inside.set()
                    time.sleep(0.2)
                    order.append(name)

    try:
        phases = daemon.job("survivor")
        thread = threading.Thread(target=run, args=(phases,))
        thread.start()
        for _ in range(2):
            inside.clear()
            assert inside.wait(30)
            daemon.kill()
            daemon.start()
        thread.join(timeout=60)
        assert order == ["rollout", "train"] * 3
        assert daemon.finished("survivor") == order
    finally:
        daemon.stop()


JOB = """
import json, sys, time
from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient
from rollpacker.rollmux.service.client.phase import Phases
url, token, job, log, iterations = sys.argv[1:]
client = MuxClient(url, token)
phases = Phases(client, job)
while True:
    known = client.job(job)
    if known["done"] == int(iterations):
        break
    try:
        with phases.phase(known["next"]) as permit:
            begun = time.monotonic()
            time.sleep(0.15)
            phases.check()
            line = [permit.token, permit.nodes, permit.phase, begun, time.monotonic()]
            with open(log, "a") as file:
                file.write(json.dumps(line) + "\\n")
    except LeaseLostError:
        continue
phases.end()
"""


def test_a_killed_job_is_taken_over_by_its_next_process(daemon: Daemon, tmp_path: Path) -> None:
    """Two jobs on the same nodes; one of them is killed again and again."""
    iterations, log = 4, tmp_path / "phases.jsonl"
    for name in ("killed", "spared"):
        daemon.job(name)

    def start(name: str) -> subprocess.Popen[str]:
        return background(JOB, daemon.url, daemon.token_file, name, log, iterations)

    spared, victim = start("spared"), start("killed")
    for _ in range(2):
        before = len(lines(log))
        while len(lines(log)) < before + 2 and victim.poll() is None:
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        victim = start("killed")
    for process in (spared, victim):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    for name in ("killed", "spared"):
        assert daemon.finished(name) == ["rollout", "train"] * iterations
    spans = [(node, begun, ended) for _, nodes, _, begun, ended in lines(log) for node in nodes]
    for node in {span[0] for span in spans}:
        mine = sorted(span[1:] for span in spans if span[0] == node)
        assert all(first[1] <= second[0] for first, second in pairwise(mine))


def start_agent(daemon: Daemon, node: str, *words: str) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "mux", "agent", "--url", daemon.url]
    return subprocess.Popen(
        [*command, "--token-file", str(daemon.token_file), "--node", node, *words]
    )


def node_state(daemon: Daemon, node: str) -> str:
    return daemon.client().node(node)["state"]


def wait_for(daemon: Daemon, node: str, *states: str) -> None:
    until = time.monotonic() + 40
    while node_state(daemon, node) not in states:
        assert time.monotonic() < until, node_state(daemon, node)
        time.sleep(0.1)


def test_the_nodes_of_a_killed_agent_are_replaced(daemon: Daemon) -> None:
    moves: list[str] = []
    phases = daemon.job("orphan", on_move=lambda move: moves.append(move.reason))
    with phases.phase("rollout") as permit:
        assert permit is not None
        node = permit.nodes[0]
    agent = start_agent(daemon, node)
    seen = time.monotonic()
    while time.monotonic() < seen + 1.5 * daemon.ttl:
        assert node_state(daemon, node) == "held"
        time.sleep(0.2)
    agent.kill()
    agent.wait()
    wait_for(daemon, node, "failed")
    with pytest.raises(StateLostError), phases.phase("train"):
        pytest.fail("trained on rollouts that are gone")
    assert moves == ["failure"]
    with phases.phase("rollout") as permit:
        assert permit is not None
        assert node not in permit.nodes
    with phases.phase("train"):
        pass
    assert daemon.finished("orphan") == ["rollout", "rollout", "train"]
    assert daemon.client().job("orphan")["done"] == 1
    phases.end()


def test_a_node_that_fails_its_check_is_given_up_and_emptied(
    daemon: Daemon, tmp_path: Path
) -> None:
    phases = daemon.job("sick-node")
    sick, emptied = tmp_path / "sick", tmp_path / "emptied"
    nodes: list[str] = []

    def work_on_a_sick_node() -> None:
        with phases.phase("rollout") as permit:
            assert permit is not None
            nodes.extend(permit.nodes)
            words = ("--check", f"test ! -e {sick}", "--on-failed", f"touch {emptied}")
            agent = start_agent(daemon, nodes[0], *words)
            sick.touch()
            assert agent.wait(timeout=60) == 1
            wait_for(daemon, nodes[0], "failed", "failing")
            until = time.monotonic() + 60
            while time.monotonic() < until:
                phases.check()
                time.sleep(0.05)

    with pytest.raises(LeaseLostError):
        work_on_a_sick_node()
    assert emptied.exists()
    phases.end()
    again = NodeAgent(daemon.client(), nodes[0])
    assert "given it up" in str(again.run())


def test_health_checks_say_what_is_wrong() -> None:
    assert check_command(["true"]) is None
    assert check_command(["false"]) == "false exited with 1: no output"
    assert "gone" in str(check_command([sys.executable, "-c", "raise SystemExit('gone')"]))
    assert json.dumps(check_command(["/no/such/command"])).startswith('"/no/such/command: ')
