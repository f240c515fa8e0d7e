"""Named nodes for real: a daemon with an inventory, agents as processes, two jobs, the commands."""

import json
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from mux_real_daemon import COMMAND, Daemon, spec
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.cli.mux import jobs
from rollpacker.core.codec import plain
from rollpacker.rollmux.service.client.client import MuxError
from rollpacker.rollmux.service.client.phase import Phases

INVENTORY = """
nodes:
  - {name: "roll-[0-1]", pool: rollout, memory_gb: 1, devices: 1}
  - {name: train-0, pool: train, memory_gb: 1, devices: 1, rack: a}
teams:
  - {name: math, rollout: 1, train: 1}
"""
SMALL = {"rollout_memory_gb": 0.5, "train_memory_gb": 0.5}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("named")
    file = folder / "nodes.yaml"
    file.write_text(INVENTORY, encoding="utf-8")
    running = Daemon(folder, first=("--inventory", str(file)))
    yield running
    running.stop()


def agent(daemon: Daemon, node: str, *words: str) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "mux", "agent", "--url", daemon.url]
    command += ["--token-file", str(daemon.token_file), "--node", node, *words]
    return subprocess.Popen(command)


def until(daemon: Daemon, node: str, **wanted: Any) -> None:
    end = time.monotonic() + 40
    while not wanted.items() <= (seen := daemon.client().node(node)).items():
        assert time.monotonic() < end, seen
        time.sleep(0.1)


def alone(daemon: Daemon, name: str, **more: Any) -> Phases:
    """A job that shares with nobody."""
    phases = Phases(daemon.client(), name)
    phases.submit(replace(spec(name, **SMALL | {"iterations": 50} | more), slo=1.0))
    return phases


def test_a_job_that_fits_no_nodes_is_told_why(daemon: Daemon) -> None:
    with pytest.raises(MuxError, match="job large: ") as caught:
        alone(daemon, "large", rollout_nodes=500)
    assert (caught.value.status, caught.value.code) == (409, "too_large")
    again = alone(daemon, "twice")
    alone(daemon, "twice")
    again.end()


def test_a_job_waits_for_the_nodes_of_another_and_then_runs(daemon: Daemon) -> None:
    first = alone(daemon, "first")
    with first.phase("rollout") as permit:
        assert permit is not None
        assert permit.nodes[0].startswith("roll-")
    about = {"iterations": None, "expected_iterations": 40}
    second = alone(daemon, "second", train_nodes=1, rollout_nodes=2, **about)
    end = time.monotonic() + 40
    while "waits: 1 of 1: second, starts in about " not in (said := daemon.mux("status")):
        assert time.monotonic() < end, said
        time.sleep(0.1)
    assert "0/50" in said
    assert "0/~40" in said
    assert "it needs 2 rollout nodes (1 free) and 1 train node (0 free) of its own" in said
    assert "team math: 0.0 of 1 rollout nodes" in said
    assert re.search("job .*team .*state", said), "there are jobs of no team, too"
    found: list[tuple[str, ...]] = []

    def run() -> None:
        with second.phase("rollout") as got:
            assert got is not None
            found.append(got.nodes)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(1.0)
    assert not found
    first.end()
    thread.join(30)
    assert [sorted(nodes) for nodes in found] == [["roll-0", "roll-1"]]
    second.end()


def test_a_promise_that_was_missed_is_said_when_the_job_is_over(daemon: Daemon) -> None:
    job = alone(daemon, "late")
    with job.phase("rollout"):
        time.sleep(0.05)
    with job.phase("train"):
        time.sleep(0.05)
    time.sleep(0.3)
    job.end()
    broken = r"SLO of 1 missed: slowdown \d+\.\d\d"
    assert re.fullmatch(rf"job late: ended\n{broken}\n", daemon.mux("wait", "late"))
    assert re.search(
        rf"ended: late, ended after 1/50 iterations, {broken}, \d s ago", daemon.mux("status")
    )


def test_how_a_job_ended_is_said_though_nobody_answers_any_more(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise RuntimeError

    alone(daemon, "owned", owner="me").end()
    monkeypatch.setattr(jobs, "_later", away)
    assert daemon.mux("wait", "owned").startswith("job owned: ended\n")


@pytest.mark.parametrize(
    ("team", "note"),
    [
        ("math", ""),
        ("maths", "note: no nodes are guaranteed to team maths. The inventory has math\n"),
        ("", "note: no nodes are guaranteed to jobs without a team. The inventory has math\n"),
    ],
)
def test_a_team_that_owns_nothing_is_pointed_out(
    daemon: Daemon, tmp_path: Path, team: str, note: str
) -> None:
    file = tmp_path / "job.json"
    name = f"of-{team or 'nobody'}"
    file.write_text(json.dumps(plain(spec(name, **SMALL, team=team))), encoding="utf-8")
    asked = ["mux", "submit", str(file), "--url", daemon.url, "--state", str(daemon.folder)]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.stderr) == (0, note)
    daemon.mux("end", name)


def test_a_submission_that_is_repeated_is_one_job(daemon: Daemon, tmp_path: Path) -> None:
    """Its answer was lost; by then the job may be over, too."""
    file = tmp_path / "job.json"
    told = plain(spec("again", **SMALL, owner="me"))
    file.write_text(json.dumps(told), encoding="utf-8")
    assert "job again submitted" in daemon.mux("submit", str(file))
    daemon.mux("end", "again")
    for _ in range(2):
        assert "job again.2 submitted" in daemon.mux("submit", str(file), "--key", "k" * 128)
    daemon.mux("end", "again.2")
    assert "job again.2 submitted" in daemon.mux("submit", str(file), "--key", "k" * 128)
    assert "job again.3 submitted" in daemon.mux("submit", str(file), "--key", "another")
    daemon.mux("end", "again.3")


def test_nodes_join_are_drained_and_fail_by_their_agents(daemon: Daemon) -> None:
    joined = agent(daemon, "roll-9", "--pool", "rollout", "--rack", "b", "--label", "gpu=h20")
    until(daemon, "roll-9", status="open", agent=True)
    assert daemon.client().node("roll-9")["machine"]["labels"] == {"gpu": "h20"}
    for node in ("roll-1", "roll-0"):
        said = daemon.mux("node", "cordon", node, "--reason", "slow link")
        assert said.startswith(f"node {node}: cordoned; to use it again: rollpacker mux node unc")
    job = alone(daemon, "picky", rollout_labels={"gpu": "h20"})
    with job.phase("rollout") as permit:
        assert permit is not None
        assert permit.nodes == ("roll-9",)
    job.end()
    job = alone(daemon, "moving")
    told = shlex.split(said.partition("again: rollpacker ")[2])
    assert CliRunner().invoke(app, told).stdout == "node roll-0: open\n"
    # It goes at once: it is between two iterations.
    assert json.loads(daemon.mux("node", "drain", "roll-9", "--json"))["jobs"] == ["moving"]
    with job.phase("rollout") as permit:
        assert permit is not None
        assert permit.nodes == ("roll-0",)
    assert "roll-9" in daemon.mux("node", "list")
    joined.send_signal(signal.SIGKILL)
    joined.wait()
    until(daemon, "roll-9", state="failed")
    job.end()
    assert "removed" in daemon.mux("node", "remove", "roll-9")


def test_a_listed_node_that_failed_is_used_again_when_its_agent_is_back(daemon: Daemon) -> None:
    daemon.mux("node", "uncordon", "roll-1")
    daemon.client().node_failed("roll-1", "no power")
    until(daemon, "roll-1", status="down")
    back = agent(daemon, "roll-1")
    try:
        until(daemon, "roll-1", status="open", agent=True)
    finally:
        back.terminate()
        assert back.wait() == 0
