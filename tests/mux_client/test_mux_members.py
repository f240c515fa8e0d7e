"""A run over nodes that RollMux's own agents serve: no other launcher, and nobody names a node."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mux_real_daemon import Daemon
from runtime_jobs import Workshop, checkpoints, kept_samples, run, times_trained, weights_digest
from test_mux_programs import Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
INVENTORY = """
nodes:
  - {name: "roll-[0-1]", pool: rollout, memory_gb: 4, devices: 1}
  - {name: "train-[0-2]", pool: train, memory_gb: 4, devices: 1}
"""
NODES = ("roll-0", "roll-1", "train-0", "train-1", "train-2")
ROWS = 12
SEPARATE: dict[str, Any] = {"pin": False, "kind": "cpu", "layout": "separate", "training": 2}
FOUR = SEPARATE | {"per_node": 1, "nodes": 4}
HERE = SEPARATE | {"per_node": 4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("members"), INVENTORY)
    made.agent(*NODES)
    yield made
    made.close()


shop = Workshop.fixture(rows=ROWS)


def submit(cluster: Cluster, shop: Workshop, name: str, **changes: Any) -> Path:
    """The run's folder."""
    memory = {"rollout_memory_gb": 0.5, "train_memory_gb": 0.5}
    mux = memory | {"worst_rollout_s": 30.0, "worst_train_s": 30.0, "slo": 1e5, "job": name}
    there = {"devices": FOUR, "cluster": {"address": "mux", "heartbeat_s": 2.0}, "mux": mux}
    config = shop.file(name, deterministic=True, checkpoint={"every": 1}, **there, **changes)
    assert "submitted" in cluster.mux("submit", str(config))
    return shop.folder / name


def last(folder: Path) -> Path:
    return folder / f"checkpoint-{checkpoints(folder)[-1]}"


def attempts(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return cluster.program(name)["attempts"]


def test_it_trains_what_it_trains_alone_and_leaves_nobody(cluster: Cluster, shop: Workshop) -> None:
    alone, _ = run(shop.config("alone", deterministic=True, checkpoint={"every": 1}, devices=HERE))
    folder = submit(cluster, shop, "spread")
    assert cluster.mux("wait", "spread") == "job spread: done\n"
    (attempt,) = attempts(cluster, "spread")
    assert (attempt["node"], attempt["members"][0]) == ("roll-0", "roll-1")
    assert kept_samples(folder) == kept_samples(alone)
    assert weights_digest(last(folder)) == weights_digest(last(alone))
    phases = [p for p in cluster.daemon.client().timeline(600.0) if p["job"] == "spread"]
    assert {len(p["nodes"]) for p in phases} == {2}
    until(lambda: not members("spread"))


def members(job: str) -> list[psutil.Process]:
    """Of a job, on the nodes where its driver is not."""
    found = list[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[2:5] == ["rollpacker", "mux", "member"] and words[5] == job:
            found.append(process)
    return found


@pytest.mark.slow
def test_a_lost_member_and_a_drained_node_begin_another_attempt(
    cluster: Cluster, shop: Workshop
) -> None:
    slow = {"function": f"{shop.rewards}:assassin", "options": {"victims": 0, "pause": 1.0}}
    folder = submit(cluster, shop, "struck", epochs=4, rewards=[slow])
    until(lambda: checkpoints(folder))
    os.kill(members("struck")[0].pid, signal.SIGKILL)
    until(lambda: len(attempts(cluster, "struck")) == 2)
    until(lambda: checkpoints(folder)[-1] > 2)
    (used,) = {*attempts(cluster, "struck")[-1]["members"]} & {"train-0"}
    cluster.mux("node", "drain", used)
    until(lambda: len(attempts(cluster, "struck")) == 3)
    assert cluster.mux("wait", "struck") == "job struck: done\n"
    first, second, third = attempts(cluster, "struck")
    assert first["broken"]
    assert not second["broken"]
    assert used not in third["members"]
    assert times_trained(folder) == Counter({f"p{i}": 4 for i in range(ROWS)})


def test_one_that_is_not_submitted_says_how(daemon: Daemon, shop: Workshop) -> None:
    mux = {"url": daemon.url, "token_file": str(daemon.token_file)}
    mux |= {"worst_rollout_s": 1.0, "worst_train_s": 1.0}
    config = shop.config("direct", devices=FOUR, cluster={"address": "mux"}, mux=mux)
    with pytest.raises(ValueError, match=r"cluster\.address=mux .* rollpacker mux submit"):
        run(config)
