"""Runs on the nodes of a Ray cluster, all of them on this machine."""

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import MEMORY, ray_nodes
from runtime_jobs import Workshop, kept_samples, run, start_cli, times_trained

from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
ROWS = 12
ONCE = Counter({f"p{i}": 1 for i in range(ROWS)})
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
FOUR: dict[str, Any] = CPU | {"per_node": 1, "nodes": 4, "layout": "separate", "training": 2}
shop = Workshop.fixture(rows=ROWS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(4) as made:
        yield made


def agents() -> list[psutil.Process]:
    """Not those of tests that run elsewhere on this machine."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        mine = process.info["cwd"] == os.getcwd()
        if mine and "rollpacker.runtime.cluster.agent" in (process.info["cmdline"] or ()):
            found.append(process)
    return found


def ended(process: subprocess.Popen[str], seconds: float = 150) -> tuple[str, str]:
    try:
        out, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # it holds the nodes of the tests that follow
        out, said = process.communicate()
    assert process.returncode == 0, said
    return out, said


def lingering(shop: Workshop, name: str, **seconds: float) -> tuple[dict[str, Any], Path]:
    """A reward during whose first long grade no update of the weights is under way, and the file
    that says when that is: a node lost inside an update takes the run back to its beginning."""
    marker = shop.folder / f"{name}.begun"
    options = {"marker": str(marker), **seconds}
    return {"function": f"{shop.rewards}:lingers", "options": options}, marker


def test_a_job_runs_on_the_nodes_of_a_ray_cluster(cluster: Any, shop: Workshop) -> None:
    here = CPU | {"per_node": 4, "layout": "separate", "training": 2}
    there = {"devices": FOUR, "cluster": {"address": cluster.address}}
    ended(start_cli("train", shop.file("there", epochs=1, deterministic=True, **there)))
    local, _ = run(shop.config("local", epochs=1, deterministic=True, devices=here))
    assert times_trained(shop.folder / "there") == ONCE
    assert kept_samples(shop.folder / "there") == kept_samples(local)
    assert not agents()


# Of nodes that Ray does not give, one is lost in test_cluster_runs too.
@pytest.mark.slow
def test_a_lost_node_is_survived_and_a_new_run_may_use_what_is_left(
    cluster: Any, shop: Workshop
) -> None:
    """Whoever removes a node removes the raylet and what it runs."""
    there = {"devices": FOUR, "cluster": {"address": cluster.address, "heartbeat_s": 1.0}}
    slow, begun = lingering(shop, "lost")
    process = start_cli("train", shop.file("lost", epochs=10, rewards=[slow], **there))
    folder = shop.folder / "lost"
    until(begun.exists, within_s=180.0)
    cluster.remove_node(cluster.members.pop(), allow_graceful=False)
    _, said = ended(process)
    assert "is gone" in said
    assert times_trained(folder) == Counter({f"p{i}": 10 for i in range(ROWS)})
    until(lambda: not agents(), within_s=180.0)
    cluster.members.append(cluster.add_node(num_cpus=1, object_store_memory=MEMORY))
    ended(start_cli("train", shop.file("again", epochs=1, **there)))


@pytest.mark.slow
def test_a_node_that_the_cluster_gives_instead_takes_part(cluster: Any, shop: Workshop) -> None:
    there = {"devices": FOUR, "cluster": {"address": cluster.address, "heartbeat_s": 1.0}}
    slow, begun = lingering(shop, "back", then=1.0)
    process = start_cli("train", shop.file("back", epochs=900, rewards=[slow], **there))
    folder = shop.folder / "back"
    until(begun.exists, within_s=180.0)
    cluster.remove_node(cluster.members.pop(), allow_graceful=False)
    until(lambda: taking_part(folder) == 3, within_s=180.0)
    cluster.members.append(cluster.add_node(num_cpus=1, object_store_memory=80_000_000))
    until(lambda: taking_part(folder) == 4, within_s=180.0)
    process.terminate()  # which Ray would take for itself
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert re.search("(engine|replica) [01]: back from step", said)
    counts = times_trained(folder)
    assert max(counts.values()) - min(counts.values()) <= 1
    until(lambda: not agents(), within_s=180.0)


def test_a_killed_driver_leaves_nobody_behind(cluster: Any, shop: Workshop) -> None:
    there = {"devices": FOUR, "cluster": {"address": cluster.address}}
    process = start_cli("train", shop.file("killed", epochs=500, **there))
    until(lambda: steps(shop.folder / "killed") >= 1, within_s=180.0)
    mine = [p for agent in agents() for p in (agent, *agent.children(recursive=True))]
    assert len(mine) >= 12
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(p.is_running() for p in mine), within_s=180.0)


def test_a_cluster_that_is_too_small_is_described(
    cluster: Any, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker.runtime.cluster import ray_launcher

    monkeypatch.setattr(ray_launcher, "_PLACING_S", 2.0)
    devices, where = FOUR | {"per_node": 2}, {"address": cluster.address}
    config = shop.config("small", devices=devices, cluster=where)
    said = r"no room within 2 s for devices\.nodes=4, .* with 2 CPU free\..* 4 with 1 CPU"
    with pytest.raises(ValueError, match=said):
        run(config)


def test_no_cluster_is_an_error_of_one_line(shop: Workshop) -> None:
    there = {"devices": FOUR, "cluster": {"address": "127.0.0.1:1"}}
    process = start_cli("train", shop.file("nowhere", **there))
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    last = said.splitlines()[-1]
    assert last.startswith("rollpacker: cluster.address=127.0.0.1:1: no Ray cluster there")
    assert "Traceback" not in said


def taking_part(folder: Path) -> int:
    """Engines and replicas of the newest step."""
    lines = (folder / "journal.jsonl").read_text().splitlines()
    began = [line for line in lines if '"kind":"StepStarted"' in line]
    event = json.loads(began[-1])["event"]
    return len(event["engines"]) + len(event["replicas"])


def steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len([json.loads(line) for line in path.read_text().splitlines()]) if path.exists() else 0
