"""Whole runs whose replicas are spread over several workers."""

from pathlib import Path

import polars as pl
import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    metrics,
    run,
    times_trained,
    write_rows,
)

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

TWO = {"per_node": 2, "pin": False, "kind": "cpu"}
FOUR = TWO | {"per_node": 4}
FSDP = {"kind": "fsdp"}
shop = Workshop.fixture(rows=12)


@pytest.fixture(scope="module")
def sharded(shop: Workshop) -> Path:
    """Three steps of a replica of two workers; the last two after a resume."""
    changes = {"trainer": FSDP, "devices": TWO, "checkpoint": {"every": 1, "keep": 9}}
    run(shop.config("sharded", **changes, steps=1))
    return run(shop.config("sharded", **changes, steps=3), resume=True)[0]


def first(folder: Path) -> list[tuple]:
    return [row for row in kept_samples(folder) if row[0] == 0]


def test_it_samples_and_learns_what_whole_replicas_do(shop: Workshop, sharded: Path) -> None:
    folder, _ = run(shop.config("whole", devices=TWO, steps=3))
    assert first(sharded) == first(folder)
    ours, theirs = metrics(folder), metrics(sharded)
    assert [m["step"] for m in theirs] == [0, 1, 2]
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
        assert other["trained_tokens/abs_logprob_difference"] < 1e-4
        assert other["tail/kept_vs_true_len"] == 1.0


def test_both_workers_of_a_replica_are_seen_at_its_tasks(sharded: Path) -> None:
    tasks = pl.read_ndjson(sharded / "workers.jsonl")
    each = tasks.group_by("worker").len().sort("worker").rows()
    assert [worker for worker, _ in each] == [0, 1]
    assert each[0][1] == each[1][1] > 0


def test_its_journal_replays(sharded: Path) -> None:
    found = journal.replay(sharded / "journal.jsonl", from_journal)
    assert found.events > 0
    assert not found.differences


def test_whole_replicas_go_on_from_its_checkpoint(shop: Workshop, sharded: Path) -> None:
    """Weights, moments and counts: one step more is the same step on either trainer."""
    alone = {"per_node": 1, "pin": False, "kind": "cpu"}
    settings = {"steps": 4, "checkpoint": {"every": 1, "keep": 9}, "output": str(sharded)}
    folder, _ = run(shop.config("sharded", **settings, devices=alone), resume=True)
    assert checkpoints(folder)[-1] == 4
    assert metrics(folder)[-1]["trained_tokens/abs_logprob_difference"] < 1e-4


def test_workers_that_do_not_divide_are_refused(shop: Workshop) -> None:
    with pytest.raises(ValueError, match=r"trainer.shard=2: 3 devices do not divide"):
        run(shop.config("odd", trainer=FSDP | {"shard": 2}, devices=TWO | {"per_node": 3}))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "exact", "race", "auto"])
def test_two_replicas_of_two_train_every_prompt_once(shop: Workshop, mode: str) -> None:
    settings = {"trainer": FSDP | {"shard": 2}, "devices": FOUR, "epochs": 2}
    folder, _ = run(shop.config(f"four-{mode}", mode, **settings))
    assert set(times_trained(folder).values()) == {2}


@pytest.mark.slow
def test_adapters_may_be_spread_too(shop: Workshop) -> None:
    model = {"path": str(shop.model), "lora_rank": 4}
    ours, _ = run(shop.config("lora-whole", model=model, devices=TWO, steps=2))
    theirs, _ = run(shop.config("lora-spread", model=model, trainer=FSDP, devices=TWO, steps=2))
    assert first(theirs) == first(ours)
    for one, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-3)


@pytest.mark.wide
def test_a_replica_that_loses_a_worker_is_gone_and_the_other_goes_on(shop: Workshop) -> None:
    reward = {
        "function": f"{shop.rewards}:assassin",
        "options": {"marker": str(shop.folder / "marker"), "victims": 1},
    }
    settings = {"trainer": FSDP | {"shard": 2}, "devices": FOUR, "epochs": 1}
    rows = str(write_rows(shop.folder / "twelve.jsonl", 12))
    folder, said = run(shop.config("loses", rewards=[reward], data={"path": rows}, **settings))
    assert "died" in said
    assert set(times_trained(folder).values()) == {1}
    workers = pl.read_ndjson(folder / "workers.jsonl").filter(pl.col("step") == 2)
    assert len(workers["worker"].unique()) == 2
