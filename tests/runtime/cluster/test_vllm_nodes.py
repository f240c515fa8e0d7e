"""vLLM engines of two devices on each of two nodes, with a replica of two shards a node."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import Launcher, on
from runtime_jobs import Workshop, kept_samples, metrics, run, times_trained, write_wide_model

pytestmark = pytest.mark.cluster
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
ROUNDS: dict[str, Any] = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 40}
SPREAD: dict[str, Any] = {
    "devices": CPU | {"nodes": 2, "per_node": 2},
    "engine": {"kind": "vllm", "tensor_parallel": 2, "max_running": 8, "kv_tokens": 1024},
    "trainer": {"kind": "fsdp", "shard": 2},
    # Libraries that are loaded on a busy machine let nobody else do anything for minutes.
    "cluster": {"heartbeat_s": 120.0},
}
shop = Workshop.fixture(rows=8, model=write_wide_model)


@pytest.fixture(scope="module")
def here(shop: Workshop) -> Path:
    """The same job on this machine."""
    devices = CPU | {"per_node": 1}
    return run(shop.config("here", epochs=1, rollout=ROUNDS, devices=devices))[0]


def first(folder: Path) -> list[tuple[Any, ...]]:
    """What the first step kept: later weights may differ in the last bits."""
    return [row for row in kept_samples(folder) if row[0] == 0]


def check(there: Path, here: Path) -> None:
    """It samples, trains and reports what one machine does."""
    assert first(there) == first(here)
    assert set(times_trained(there).values()) == {1}
    for row in metrics(there):
        assert row["trained_tokens/abs_logprob_difference"] < 1e-4


def test_each_node_has_an_engine_and_a_replica(shop: Workshop, here: Path) -> None:
    launcher = Launcher()
    with on(launcher):
        there, _ = run(shop.config("there", epochs=1, rollout=ROUNDS, **SPREAD))
    assert len(launcher.agents) == 2
    check(there, here)


@pytest.fixture
def address() -> Iterator[str]:
    """A Ray cluster of two nodes with two cores each, and a head without any."""
    utils = pytest.importorskip("ray.cluster_utils")
    least = {"object_store_memory": 80_000_000}
    head = least | {"num_cpus": 0, "include_dashboard": False}
    made = utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=2, **least)
    yield made.address
    made.shutdown()


@pytest.mark.slow
def test_the_nodes_may_be_those_of_ray(address: str, shop: Workshop, here: Path) -> None:
    there = SPREAD | {"cluster": SPREAD["cluster"] | {"address": address}}
    check(run(shop.config("ray", epochs=1, rollout=ROUNDS, **there))[0], here)
