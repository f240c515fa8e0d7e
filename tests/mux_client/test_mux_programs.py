"""Programs of jobs for real: a daemon, agents and what they start, all as processes."""

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mux_real_daemon import COMMAND, Daemon
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.cli.mux import jobs
from rollpacker.rollmux.service.client import Phases
from rollpacker.rollmux.service.client.client import MuxError

INVENTORY = """
nodes:
  - {name: "roll-[0-1]", pool: rollout, memory_gb: 4, devices: 1}
  - {name: train-0, pool: train, memory_gb: 4, devices: 1}
"""
LOOK_S = 0.1
"""Instead of a second, between two looks at what became of a program."""
AGENT = f"""
from rollpacker.rollmux.node import agent
agent._REPORT_S = {LOOK_S}
from rollpacker.cli import main
main()
"""
PROGRAM = """
import signal, sys, time
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.phase import Phases

url, token, job, node, iterations = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(9)))
client = MuxClient(url, token)
phases = Phases(client, job)
print("started on", node, flush=True)
while (known := client.job(job))["done"] < int(iterations):
    with phases.phase(known["next"]):
        time.sleep(0.05)
    if known["next"] == "train":
        print("iteration", known["done"] + 1, flush=True)
"""


class Cluster:
    """A daemon with named nodes, and an agent for each of them that is started."""

    def __init__(self, folder: Path, inventory: str = INVENTORY) -> None:
        (folder / "nodes.yaml").write_text(inventory, encoding="utf-8")
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        self.folder = folder
        self.daemon = Daemon(folder, ttl=6.0, first=("--inventory", str(folder / "nodes.yaml")))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def agent(self, *nodes: str, url: str = "") -> None:
        for node in nodes:
            pool = "train" if node.startswith("train") else "rollout"
            words = ["--url", url or self.daemon.url, "--token-file", str(self.daemon.token_file)]
            words += ["--node", node, "--pool", pool, "--programs", str(self.folder / node)]
            command = [sys.executable, "-c", AGENT, "mux", "agent", *words]
            self.agents[node] = subprocess.Popen(command)

    def mux(self, *words: str, code: int = 0) -> str:
        """``rollpacker mux WORDS``, which ends with ``code``."""
        return self.daemon.mux(*words, code=code)

    def submit(self, name: str, *command: str, **program: Any) -> None:
        # However slow the machine is, no promise is broken, which would be said.
        spec = {"id": name, "worst_rollout_s": 1.0, "worst_train_s": 1.0, "slo": 1e5}
        spec |= {"rollout_memory_gb": 0.5, "train_memory_gb": 0.5}
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(spec | {"program": {"command": command, **program}}))
        assert "submitted" in self.mux("submit", str(file))

    def works(self, name: str, iterations: int, **program: Any) -> None:
        """Submit a job that takes turns with the others."""
        told = ("{url}", "{token_file}", "{job}", "{node}", str(iterations))
        self.submit(name, "{python}", str(self.folder / "program.py"), *told, **program)

    def program(self, name: str) -> dict[str, Any]:
        return self.daemon.client().job(name)["program"]

    def printed(self, name: str, text: str, times: int = 1) -> bool:
        with contextlib.suppress(MuxError):
            found = self.daemon.client().call("GET", f"/v1/jobs/{name}/log")[1]
            return base64.b64decode(found["data"]).decode().count(text) >= times
        return False

    def heard_again(self, node: str, start: Callable[[], object]) -> None:
        """``start`` what was missing; the node's agent has an answer of the daemon then."""
        lease = self.folder / node / "lease"
        before = lease.read_text()
        start()
        until(lambda: lease.read_text() != before)

    def gets_on(self, name: str) -> None:
        """Some iterations."""
        done = self.daemon.client().job(name)["done"]
        until(lambda: self.daemon.client().job(name)["done"] > done + 3)

    def ends(self, name: str) -> None:
        """End a job, whose program may hear of it before it is asked to end."""
        self.mux("end", name)
        until(lambda: self.program(name)["attempts"][-1]["ended"] is not None)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for process in keepers(self.folder):
            for child in process.children(recursive=True):
                child.kill()
        self.daemon.stop()


def keepers(folder: Path) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith("node/keeper.py") for word in words) and str(folder) in words[-1]:
            found.append(process)
    return found


def until(what: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("programs"))
    made.agent("roll-0", "roll-1", "train-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_LOOK_S", LOOK_S)
        yield made
    made.close()


def test_a_submitted_job_runs_to_its_end(cluster: Cluster) -> None:
    cluster.works("plain", 3, environment={"PYTHONUNBUFFERED": "1"})
    assert cluster.mux("wait", "plain") == "job plain: done\n"
    said = cluster.mux("logs", "plain", "--follow")
    assert said.splitlines()[1:] == ["iteration 1", "iteration 2", "iteration 3"]
    assert "started on roll-" in said
    (attempt,) = cluster.program("plain")["attempts"]
    assert (attempt["number"], attempt["code"]) == (1, 0)
    until(lambda: not keepers(cluster.folder))
    assert "environment" not in cluster.program("plain")["program"]


@pytest.mark.wide
def test_a_program_that_fails_starts_again_so_often(cluster: Cluster) -> None:
    marker = cluster.folder / "marker"
    shaky = f"test -e {marker} && exit 0; touch {marker}; echo no; exit 3"
    cluster.submit("shaky", "sh", "-c", shaky)
    assert cluster.mux("wait", "shaky") == "job shaky: done\n"
    assert [each["code"] for each in cluster.program("shaky")["attempts"]] == [3, 0]
    assert cluster.mux("logs", "shaky", "--attempt", "1") == "no\n"
    cluster.submit("broken", "sh", "-c", "echo no; exit 3", restarts=1)
    said = "job broken: failed. Its output: rollpacker mux logs broken --"
    assert cluster.mux("wait", "broken", code=3).startswith(said)
    assert len(cluster.program("broken")["attempts"]) == 2
    cluster.submit("absent", "/no/such/program", restarts=0)
    cluster.mux("wait", "absent", code=127)
    assert "No such file" in cluster.mux("logs", "absent")
    said = cluster.mux("status")
    for how in ("shaky, done", "broken, failed (exit code 3)", "absent, failed (exit code 127)"):
        assert re.search(rf"ended: {re.escape(how)} after 0 iterations, \d+ s ago\n", said)


def test_a_program_without_nodes_is_starting_until_its_first_phase(cluster: Cluster) -> None:
    cluster.submit("slow", "sleep", "600")
    until(lambda: cluster.program("slow")["attempts"])
    assert re.search("slow .*starting", cluster.mux("status"))
    words = ["logs", "slow", "--url", cluster.daemon.url, "--state", str(cluster.folder)]
    quiet = CliRunner().invoke(app, ["mux", *words])
    assert (quiet.stdout, quiet.stderr) == ("", "note: attempt 1 has printed nothing yet\n")
    with Phases(cluster.daemon.client(), "slow").phase("rollout"):
        pass
    assert re.search("slow .*at work on", cluster.mux("status"))
    cluster.ends("slow")


def test_the_program_of_a_job_that_is_ended_is_stopped_with_all_it_started(
    cluster: Cluster,
) -> None:
    mark = f"sleep-{os.getpid()}"
    heirs = f"(exec -a {mark} sleep 1000) & trap '' TERM; echo up; while :; do sleep 0.1; done"
    cluster.submit("stubborn", "bash", "-c", heirs, stop_s=0.5)
    until(lambda: cluster.printed("stubborn", "up"))
    cluster.mux("end", "stubborn")
    cluster.mux("wait", "stubborn", code=137)
    assert not any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def test_a_program_goes_where_its_job_goes(cluster: Cluster) -> None:
    cluster.works("mover", 10_000, stop_s=5.0)
    until(lambda: cluster.printed("mover", "iteration 2"))
    here = cluster.program("mover")["lead"]
    there = {"roll-0": "roll-1", "roll-1": "roll-0"}[here]
    cluster.mux("node", "drain", here)
    until(lambda: cluster.program("mover")["attempts"][-1]["node"] == there)
    until(lambda: cluster.printed("mover", f"started on {there}"))
    until(lambda: cluster.printed("mover", "iteration "))
    assert "asked to end" in cluster.mux("logs", "mover", "--attempt", "1")
    assert cluster.program("mover")["used"] == 0
    cluster.mux("node", "uncordon", here)
    cluster.ends("mover")


@pytest.mark.wide
def test_an_agent_that_starts_again_finds_what_runs(cluster: Cluster) -> None:
    cluster.works("steady", 10_000)
    until(lambda: cluster.printed("steady", "iteration 1"))
    node = cluster.program("steady")["lead"]
    cluster.agents[node].kill()
    cluster.agents[node].wait()
    cluster.heard_again(node, lambda: cluster.agent(node))
    cluster.gets_on("steady")
    cluster.daemon.kill()
    cluster.heard_again(node, cluster.daemon.start)
    cluster.gets_on("steady")
    assert len(cluster.program("steady")["attempts"]) == 1
    cluster.ends("steady")


@pytest.mark.wide
def test_a_node_that_is_cut_off_runs_nothing_until_it_is_back(cluster: Cluster) -> None:
    """Its agent stands still for longer than a lease: the job goes on elsewhere, and what is left
    of it here is frozen, then killed."""
    counter = cluster.folder / "counter"
    count = f"while :; do echo $ROUND >> {counter}.$0; sleep 0.05; done"
    cluster.submit("cut", "bash", "-c", count, "{node}")
    until(lambda: cluster.program("cut")["attempts"])
    node = cluster.program("cut")["lead"]
    until(lambda: Path(f"{counter}.{node}").exists())
    cluster.agents[node].send_signal(signal.SIGSTOP)
    until(lambda: cluster.program("cut")["attempts"][-1]["node"] != node)
    other = cluster.program("cut")["attempts"][-1]["node"]
    size = Path(f"{counter}.{node}").stat().st_size
    until(lambda: Path(f"{counter}.{other}").exists())
    time.sleep(0.5)
    assert Path(f"{counter}.{node}").stat().st_size == size
    cluster.agents[node].send_signal(signal.SIGCONT)
    assert cluster.agents[node].wait(timeout=60) == 1
    until(lambda: len(keepers(cluster.folder)) == 1)
    assert Path(f"{counter}.{node}").stat().st_size == size
    cluster.ends("cut")
    cluster.agent(node)
    until(lambda: cluster.daemon.client().node(node)["status"] == "open")


def test_a_run_that_is_over_is_submitted_under_its_next_name(cluster: Cluster) -> None:
    file = cluster.folder / "again.json"
    spec = {"id": "again", "owner": "me", "worst_rollout_s": 1.0, "worst_train_s": 1.0, "slo": 1e5}
    spec |= {"rollout_memory_gb": 0.5, "train_memory_gb": 0.5}
    file.write_text(json.dumps(spec | {"program": {"command": ["true"]}}))
    cluster.mux("submit", str(file))
    cluster.mux("wait", "again")
    said = cluster.mux("submit", str(file)).splitlines()
    assert said[0] == "job again.2 submitted"
    asked = said[1].removeprefix("wait for its end: rollpacker mux ").split()
    done = CliRunner().invoke(app, ["mux", *asked])
    assert done.stdout == "job again.2: done\n"
    file.write_text(json.dumps(spec | {"program": {"command": ["sleep", "600"]}}))
    cluster.mux("submit", str(file))
    done = CliRunner().invoke(app, ["mux", *asked])
    assert "again.2 has ended, and its run continues as again.3: rollpacker mux wait" in done.stderr
    until(lambda: cluster.program("again.3")["attempts"])
    cluster.mux("end", "again.3")
    cluster.mux("wait", "again.3", code=143)
    file.write_text(json.dumps(spec | {"owner": "you"}))
    words = ["mux", "submit", str(file), "--url", cluster.daemon.url]
    found = CliRunner().invoke(app, [*words, "--state", str(cluster.folder)])
    assert "its id cannot be used again" in str(found.exception)


@pytest.mark.wide
def test_a_job_waits_for_an_agent_that_starts_programs(tmp_path: Path) -> None:
    idle = Cluster(tmp_path)
    try:
        idle.submit("still", "echo", "up")
        wanted = "roll-0, roll-1: rollpacker mux agent --node roll-0 --programs FOLDER"
        for words in (("status",), ("show", "still")):
            said = " ".join(idle.mux(*words).replace("│", "").split())
            assert wanted in said, said
        words = [*COMMAND, "mux", "logs", "still", "--follow", "--url", idle.daemon.url]
        follows = subprocess.Popen([*words, "--state", str(tmp_path)], stdout=subprocess.PIPE)
        idle.agent("roll-0")
        assert follows.communicate(timeout=60)[0] == b"up\n"
        idle.submit("stays", "sleep", "1000")
        until(lambda: idle.program("stays")["attempts"])
        idle.mux("node", "drain", "roll-0")
        said = " ".join(idle.mux("show", "stays").replace("│", "").split())
        assert "another node with an agent that starts programs: roll-0 is draining" in said
        assert idle.program("stays")["lead"] == "roll-0"
        idle.agent("roll-1")
        until(lambda: idle.program("stays")["attempts"][-1]["node"] == "roll-1")
        idle.mux("end", "stays")
    finally:
        idle.close()


def test_mistakes_are_said_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    times = "id: x\nworst_rollout_s: 1\nworst_train_s: 1\n"
    small = "rollout_memory_gb: 1\ntrain_memory_gb: 1\n"
    for text, said in (
        ("- a", "expected keys and values"),
        (times + small + "program: {command: []}", "program.command: must be list of length >= 1"),
        (times + "program: {command: [a], run: b}", f"{file}: unknown key 'program.run'"),
        (times + "program: {comand: [a]}", "'program.comand'; did you mean 'program.command'?"),
        (times + "rolout_nodes: 2", "unknown key 'rolout_nodes'; did you mean 'rollout_nodes'?"),
        ("worst_train_s: long", "worst_train_s: must be float, got 'long'"),
        ("model: {path: m}", "'data' is required"),
        (times + "program: {command: 'a \"'}", "program.command: No closing quotation"),
        ("model: {path: m}\ndata: {path: d}", "rewards"),
    ):
        file.write_text(text, encoding="utf-8")
        words = ["mux", "submit", str(file), "--url", cluster.daemon.url]
        found = CliRunner().invoke(app, [*words, "--state", str(cluster.folder)])
        assert isinstance(found.exception, ValueError)
        assert said in str(found.exception)
    cluster.submit("unseen", sys.executable, "-c", "pass", restarts=0)
    cluster.mux("wait", "unseen")
