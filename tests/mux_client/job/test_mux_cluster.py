"""A run over the nodes of a Ray cluster, under permits."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mux_real_daemon import Daemon
from ray_nodes import ray_nodes
from runtime_jobs import Workshop, start_cli, times_trained

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.slow]
ROWS = 12
FOUR: dict[str, Any] = {
    "pin": False,
    "kind": "cpu",
    "per_node": 1,
    "nodes": 4,
    "layout": "separate",
    "training": 2,
}


def test_it_goes_on_after_its_lease_was_lost(daemon: Daemon, tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=ROWS)
    mux = {"url": daemon.url, "token_file": str(daemon.token_file), "job": "spread"}
    mux |= {"worst_rollout_s": 30.0, "worst_train_s": 30.0}
    slow = {"function": f"{shop.rewards}:assassin", "options": {"victims": 0, "pause": 1.0}}
    with ray_nodes(4) as cluster:
        there = {"devices": FOUR, "cluster": {"address": cluster.address, "heartbeat_s": 1.0}}
        config = shop.file("spread", epochs=4, mux=mux, rewards=[slow], **there)
        process = start_cli("train", config)
        until = time.monotonic() + 120
        while len(daemon.client().timeline(3600.0)) < 3:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        daemon.kill()
        time.sleep(1.5 * daemon.ttl)
        daemon.start()
        _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    spec = daemon.client().job("spread")["spec"]
    assert (spec["rollout_nodes"], spec["train_nodes"]) == (2, 2)
    assert times_trained(shop.folder / "spread") == Counter({f"p{i}": 4 for i in range(ROWS)})
    phases = daemon.finished("spread")
    assert phases == ["rollout", "train"] * (len(phases) // 2)
    assert "died" not in said
