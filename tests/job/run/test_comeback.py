"""What was lost comes back between steps, or with the whole run."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    run,
    table,
    times_trained,
    weights_digest,
)

from rollpacker.core import journal
from rollpacker.job.run import worker_recovery
from rollpacker.job.run.stopping import Restarts
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import WorkerPool

ROWS = 12
ONCE = Counter({f"p{i}": 1 for i in range(ROWS)})
TWICE = ONCE + ONCE
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
TWO = CPU | {"per_node": 2}
SPLIT = CPU | {"per_node": 5, "layout": "separate", "training": 4}
FSDP: dict[str, Any] = {"kind": "fsdp", "shard": 2}
shop = Workshop.fixture(rows=ROWS)


def struck(shop: Workshop, name: str, **changes: Any) -> tuple[Path, str]:
    """A run one of whose workers, or some, are killed in the middle of a rollout."""
    options = {"marker": str(shop.folder / f"{name}.killed")}
    known = ("marker", "victims", "worker")
    options |= {key: changes.pop(key) for key in known if key in changes}
    reward = {"function": f"{shop.rewards}:assassin", "options": options}
    settings: dict[str, Any] = {"epochs": 1, "cluster__restarts": 3, "deterministic": True}
    return run(shop.config(name, rewards=[reward], **(settings | changes)))


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Path:
    """Two workers, of which none is lost."""
    return struck(shop, "whole", victims=0, devices=TWO, checkpoint__every=1)[0]


def last_weights(folder: Path) -> str:
    return weights_digest(folder / f"checkpoint-{checkpoints(folder)[-1]}")


def test_a_lost_worker_is_back_in_the_next_step(shop: Workshop, whole: Path) -> None:
    folder, said = struck(shop, "one", worker=1, devices=TWO)
    assert "worker 1 died: exit code -9; lost: engine 1, replica 1" in said
    assert "engine 1, replica 1: back from step" in said
    assert times_trained(folder) == ONCE
    rows = table(folder)
    assert set(rows.filter(rows["step"] == rows["step"].max())["worker"]) == {0, 1}
    assert kept_samples(folder) == kept_samples(whole)
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    assert not (folder / ".handed-over").exists()


@pytest.mark.wide
def test_so_is_the_one_that_shares_its_weights(shop: Workshop) -> None:
    """A shard takes its replica along: both come back, and the first replica shares again."""
    folder, said = struck(shop, "shard", worker=1, devices=SPLIT, trainer=FSDP)
    assert "worker 1 died: exit code -9; lost: replica 0" in said
    assert "replica 0: back from step" in said
    assert times_trained(folder) == ONCE


@pytest.mark.wide
def test_without_waiting_it_comes_when_it_is_ready(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts as late as in the second step without it."""
    between_steps, start_again = (
        worker_recovery.WorkerRecovery.between_steps,
        WorkerPool.start_again,
    )
    steps, begin = list[int](), asyncio.Event()

    async def late(self: WorkerPool, workers: set[int]) -> None:
        await begin.wait()
        await start_again(self, workers)

    async def looked(self: worker_recovery.WorkerRecovery, step: int) -> bool:
        if self._starting is not None:
            steps.append(step)
            if len(steps) == 2:
                begin.set()
                await asyncio.wait([self._starting])
        return await between_steps(self, step)

    monkeypatch.setattr(WorkerPool, "start_again", late)
    monkeypatch.setattr(worker_recovery.WorkerRecovery, "between_steps", looked)
    changes = {"deterministic": False, "epochs": 2}
    folder, said = struck(shop, "later", worker=1, devices=TWO, **changes)
    without, back = steps
    assert f"engine 1, replica 1: back from step {back} on" in said
    rows = table(folder)
    assert set(rows.filter(rows["step"] == without)["worker"]) == {0}
    assert times_trained(folder) == TWICE


@pytest.mark.wide
def test_one_that_cannot_start_is_given_up(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(shop.model, model)
    lost = WorkerPool.lost

    def forgetful(self: WorkerPool) -> set[int]:
        found = lost(self)
        if found and model.exists():
            shutil.rmtree(model)
        return found

    monkeypatch.setattr(WorkerPool, "lost", forgetful)
    changes = {"model": {"path": str(model)}, "cluster__restarts": 2, "epochs": 2}
    folder, said = struck(shop, "homeless", worker=1, devices=TWO, **changes)
    assert "could not be started again (1 of cluster.restarts=2)" in said
    assert "(2 of cluster.restarts=2)" in said
    assert "the run goes on without them" in said
    assert said.count("could not be started again") == 2
    assert times_trained(folder) == TWICE


@pytest.mark.wide
def test_a_run_that_lost_everybody_starts_again_and_is_the_same(
    shop: Workshop, whole: Path
) -> None:
    folder, said = struck(shop, "all", victims=2, devices=TWO, checkpoint__every=1)
    assert "the run starts again from checkpoint-1 (1 of cluster.restarts=3)" in said
    assert times_trained(folder) == ONCE
    assert kept_samples(folder) == kept_samples(whole)
    assert last_weights(folder) == last_weights(whole)


@pytest.mark.wide
def test_one_without_a_checkpoint_starts_from_the_beginning(shop: Workshop, whole: Path) -> None:
    folder, said = struck(shop, "anew", victims=2, devices=TWO)
    assert "the run starts again from the beginning (1 of cluster.restarts=3)" in said
    assert times_trained(folder) == ONCE
    assert kept_samples(folder) == kept_samples(whole)


@pytest.mark.wide
def test_not_for_ever(shop: Workshop) -> None:
    """It happens each time."""
    changes = {"devices": CPU | {"per_node": 1}, "cluster__restarts": 1}
    with pytest.raises(WorkerError, match="worker 0 died"):
        struck(shop, "again", marker="", victims=1, **changes)


def test_restarts_are_counted_from_the_newest_checkpoint() -> None:
    restarts = Restarts(2)
    lost = WorkerError("worker 0 died: exit code -9")
    assert not restarts.again(-1, lost)
    restarts.begin()
    assert [restarts.again(step, lost) for step in (-1, -1, -1, 3, 3, 3, 2, 4)] == [
        *(True, True, False),
        *(True, True, False),
        *(False, True),
    ]
    assert str(restarts) == "the run starts again from checkpoint-4 (1 of cluster.restarts=2)"
    assert not Restarts(0).again(5, lost)


def test_what_code_raises_again_is_not_tried_a_third_time() -> None:
    restarts = Restarts(9)
    restarts.begin()
    one, other = (WorkerError(f"worker {n} died: Traceback: line {n}") for n in (1, 2))
    same = WorkerError("worker 7 died: Traceback: line 1; no engine is left")
    tried = [restarts.again(*each) for each in ((-1, one), (-1, other), (-1, one), (3, one))]
    assert tried == [True] * 4
    assert not restarts.again(3, one)
    assert restarts.again(3, same)


class Pool:
    """Workers that start, or not, as a test says."""

    def __init__(self) -> None:
        self.replicas = (0, 1)
        self.starts: list[Exception | None] = []
        self.given_up = 0

    def regain(self) -> None:
        pass

    def lost(self) -> set[int]:
        return {1} if self.starts else set()

    async def start_again(self, _workers: set[int]) -> None:
        if (error := self.starts.pop(0)) is not None:
            raise error

    def admit(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1,), ()

    def give_up(self) -> None:
        self.given_up += 1


def test_a_start_that_fails_leaves_alone_who_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def published(_pool: Any, _step: int) -> list[str]:
        return []

    async def main() -> None:
        pool, said = Pool(), list[str]()
        workers: Any = pool
        back = worker_recovery.WorkerRecovery(
            workers, tmp_path, tries=2, wait=True, note=said.append
        )
        pool.starts = [None, WorkerError("ill"), None, *[WorkerError("ill")] * 3]
        found = [await back.between_steps(step) for step in range(8)]
        assert found == [True, False, True, False, False, False, False, False]
        assert pool.given_up == 0
        assert len(pool.starts) == 1
        assert [line for line in said if "goes on without" in line] == said[-1:]

    monkeypatch.setattr(worker_recovery, "publish", published)
    asyncio.run(main())
