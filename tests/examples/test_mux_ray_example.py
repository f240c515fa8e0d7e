"""The agents of RollMux on the nodes of a Ray cluster, all of them on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
FOLDER = Path(__file__).parents[2] / "examples" / "mux"
COMMAND = [sys.executable, "-c", "from rollpacker.cli import main; main()", "mux"]
MEMORY = 80_000_000


@pytest.fixture
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils")
    head = {"object_store_memory": MEMORY, "num_cpus": 0, "include_dashboard": False}
    made = utils.Cluster(initialize_head=True, head_node_args=head)
    for pool in ("rollout", "rollout", "train"):
        made.add_node(num_cpus=1, object_store_memory=MEMORY, resources={pool: 1})
    yield made
    made.shutdown()


class Mux:
    """A daemon, and commands for it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        (folder / "nodes.yaml").write_text("nodes: []\n")
        words = ["serve", "--state", str(self.state), "--port", "0", "--ttl", "6"]
        words += ["--inventory", str(folder / "nodes.yaml")]
        self.process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[2].rstrip(",")

    def __call__(self, *words: str) -> str:
        asked = [*COMMAND, *words, "--url", self.url, "--state", str(self.state)]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    def open(self) -> dict[str, str]:
        nodes = json.loads(self("node", "list", "--json"))["nodes"]
        return {each["name"]: each["pool"] for each in nodes if each["status"] == "open"}


def test_every_node_of_a_pool_has_an_agent_that_ray_starts_again(
    cluster: Any, tmp_path: Path
) -> None:
    mux = Mux(tmp_path)
    example = [sys.executable, str(FOLDER / "ray_agents.py"), "--address", cluster.address]
    told = ["--url", mux.url, "--token-file", str(mux.state / "token")]
    told += ["--programs", str(tmp_path / "programs")]
    try:
        for _ in range(2):
            subprocess.run([*example, *told], check=True, timeout=120)
        assert sorted(mux.open().values()) == ["rollout", "rollout", "train"]
        spec = {"id": "a", "worst_rollout_s": 9, "worst_train_s": 9, "rollout_memory_gb": 0.1}
        spec |= {"train_memory_gb": 0.1, "program": {"command": "bash -c 'echo {node}; sleep 20'"}}
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(spec))
        mux("submit", str(tmp_path / "a.yaml"))
        until(lambda: list((tmp_path / "programs").glob("*/a.1/log")), within_s=120.0)
        for pid in agents():
            os.kill(pid, signal.SIGKILL)
        assert mux("wait", "a") == "job a: done\n"
        assert mux("logs", "a", "--attempt", "1").strip() in mux.open()
        until(lambda: len(mux.open()) == 3, within_s=120.0)
        assert len(agents()) == 3
    finally:
        subprocess.run([*example, "--stop"], check=True, timeout=120)
        mux.process.terminate()
        mux.process.wait()
    until(lambda: not agents(), within_s=120.0)


def agents() -> list[int]:
    """Ray names the processes of actors after their class."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().startswith("ray::Agent"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
