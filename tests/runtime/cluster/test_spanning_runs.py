"""Whole runs of vLLM engines that span two devices each, and replicas of two shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cluster_jobs import Launcher, on
from runtime_jobs import Workshop, kept_samples, metrics, run, times_trained, write_wide_model
from spanning_runs import streamed, timeline_rows

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

pytestmark = pytest.mark.cluster
FOUR = {"per_node": 4, "pin": False, "kind": "cpu"}
PAIRS: dict[str, Any] = {
    "devices": FOUR,
    "engine": {"kind": "vllm", "tensor_parallel": 2, "max_running": 16, "kv_tokens": 2048},
    "trainer": {"kind": "fsdp", "shard": 2},
}
LENGTHS = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 80,
    # What is measured differs between machines.
    "streaming": {"scaling": "fixed", "scaling_fraction": 0.6, "group_tokens": 1},
}
"""Most responses have fewer than 18 tokens and the longest of a step more than 50: a tail."""
OTHERS = ("off", "race", "auto")
shop = Workshop.fixture(rows=8, model=write_wide_model)


# The others in the soak: each is two runs, one with four processes.
@pytest.fixture(
    scope="module",
    params=["exact", *(pytest.param(mode, marks=pytest.mark.slow) for mode in OTHERS)],
)
def made(shop: Workshop, request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    """A mode, a run of it with ``mini``, and one whose engines and replicas have two devices."""
    mode = request.param
    asked = {"epochs": 1, "rollout": LENGTHS | {"tail_batching": {"mode": mode}}}
    ours, _ = run(shop.config(f"mini-{mode}", mode, **asked))
    theirs, _ = run(shop.config(f"pairs-{mode}", mode, **asked, **PAIRS))
    return mode, ours, theirs


def sampled(folder: Path) -> dict[tuple[str, int], tuple[int, str]]:
    """Length and end of what the first step kept, by prompt and sample."""
    rows = [row for row in kept_samples(folder) if row[0] == 0]
    return {(prompt, index): (tokens, end) for _, prompt, index, tokens, _, end in rows}


def test_the_first_step_samples_what_mini_does(made: tuple[str, Path, Path]) -> None:
    mode, ours, theirs = made
    one, other = sampled(ours), sampled(theirs)
    if mode in ("off", "exact"):
        assert other == one
    both = one.keys() & other.keys()  # of a race, those that came first in both
    assert both
    assert all(other[key] == one[key] for key in both)


def test_it_trains_what_it_sampled(made: tuple[str, Path, Path]) -> None:
    mode, _, theirs = made
    assert set(times_trained(theirs).values()) == {1}
    for row in metrics(theirs):
        assert row["trained_tokens/abs_logprob_difference"] < 1e-4
        if mode in ("off", "exact"):
            assert row["tail/kept_vs_true_len"] == 1.0
    found = journal.replay(theirs / "journal.jsonl", from_journal)
    assert found.events > 0
    assert not found.differences


def test_a_replica_sums_gradients_while_the_other_engine_decodes(
    made: tuple[str, Path, Path],
) -> None:
    mode, _, theirs = made
    if mode == "exact":
        assert streamed(theirs)
    if mode == "off":
        assert not streamed(theirs)


def test_the_timeline_has_both_engines_with_their_replicas(made: tuple[str, Path, Path]) -> None:
    _, _, theirs = made
    rows = timeline_rows(theirs)
    workers = {name: shown for name, shown in rows.items() if name.startswith("worker")}
    assert set(workers) == {"worker 0", "worker 1"}
    assert all("gradient" in shown and "kept" in shown for shown in workers.values())
    tasks = pl.read_ndjson(theirs / "workers.jsonl")
    assert set(tasks["worker"]) == {0, 1}


# vLLM engines of two devices on each of two nodes, with a replica of two shards a node.


CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
ROUNDS: dict[str, Any] = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 40}
SPREAD: dict[str, Any] = {
    "devices": CPU | {"nodes": 2, "per_node": 2},
    "engine": {"kind": "vllm", "tensor_parallel": 2, "max_running": 8, "kv_tokens": 1024},
    "trainer": {"kind": "fsdp", "shard": 2},
    # Libraries that are loaded on a busy machine let nobody else do anything for minutes.
    "cluster": {"heartbeat_s": 120.0},
}


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
