"""Killed agents and sick nodes: their nodes are replaced, and no phase is counted twice."""

import json
import sys
import time
from pathlib import Path

import pytest
from mux_real_daemon import Daemon
from test_mux_nodes import agent

from rollpacker.rollmux.node.agent import NodeAgent, check_command
from rollpacker.rollmux.service.client.client import LeaseLostError
from rollpacker.rollmux.service.client.phase import StateLostError

# Real kills, and leases of seconds that have to run out.
pytestmark = pytest.mark.slow


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
    process = agent(daemon, node)
    seen = time.monotonic()
    while time.monotonic() < seen + 1.5 * daemon.ttl:
        assert node_state(daemon, node) == "held"
        time.sleep(0.2)
    process.kill()
    process.wait()
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
            process = agent(daemon, nodes[0], *words)
            sick.touch()
            assert process.wait(timeout=60) == 1
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
