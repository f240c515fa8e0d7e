"""Whole runs in which an engine, or a replica, with processes of its own is killed or frozen."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    run,
    times_trained,
    weights_digest,
    write_wide_model,
)

from rollpacker.config import RunConfig
from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages.faults import WorkerError

CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
ROWS = 12
ONCE = Counter({f"p{i}": 1 for i in range(ROWS)})
TWO_AND_TWO: dict[str, Any] = {
    "devices": CPU | {"per_node": 4, "layout": "separate", "training": 2}
}
ONE_AND_ONE: dict[str, Any] = {
    "devices": CPU | {"per_node": 2, "layout": "separate", "training": 1}
}
SHARDED: dict[str, Any] = {
    "devices": CPU | {"per_node": 5, "layout": "separate", "training": 4},
    "trainer": {"kind": "fsdp", "shard": 2},
}
shop = Workshop.fixture(rows=ROWS)


@pytest.fixture(scope="module")
def undisturbed(shop: Workshop) -> Path:
    """One engine and one replica; a checkpoint at every step."""
    settings: dict[str, Any] = {"epochs": 1, "checkpoint__every": 1, "deterministic": True}
    return run(shop.config("undisturbed", **settings, **ONE_AND_ONE))[0]


def struck(
    shop: Workshop,
    worker: int,
    by: str = "SIGKILL",
    *,
    at: int = 5,
    mode: str = "exact",
    **more: Any,
) -> RunConfig:
    """A run of one epoch whose reward strikes a worker, once."""
    name = f"{len([*shop.folder.iterdir()])}-{worker}-{by}"
    marker = str(shop.folder / f"{name}.struck")
    options = {"marker": marker, "worker": worker, "by": by, "at": at}
    reward = {"function": f"{shop.rewards}:assassin", "options": options}
    settings: dict[str, Any] = {"epochs": 1, "cluster__heartbeat_s": 1.0, "checkpoint__every": 1}
    return shop.config(name, mode, rewards=[reward], **settings, **more)


def survived(config: RunConfig, worker: int, by: str) -> Path:
    """It went on without the worker, and trained every prompt once."""
    folder, said = run(config)
    why = "exit code -9" if by == "SIGKILL" else "it gave no sign of life"
    assert f"worker {worker} died: {why}" in said
    assert times_trained(folder) == ONCE
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    return folder


@pytest.mark.parametrize(
    ("worker", "by"),
    [
        (1, "SIGKILL"),
        pytest.param(2, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(0, "SIGSTOP", marks=pytest.mark.slow),
        pytest.param(3, "SIGSTOP", marks=pytest.mark.wide),
    ],
    ids=["engine killed", "replica killed", "engine frozen", "replica frozen"],
)
def test_one_of_two_is_survived(shop: Workshop, undisturbed: Path, worker: int, by: str) -> None:
    folder = survived(struck(shop, worker, by, **TWO_AND_TWO), worker, by)
    assert first(folder) == first(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "race", "auto"])
@pytest.mark.parametrize("worker", [0, 2], ids=["engine", "replica"])
def test_it_is_in_every_mode(shop: Workshop, mode: str, worker: int) -> None:
    survived(struck(shop, worker, mode=mode, **TWO_AND_TWO), worker, "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 7])
def test_a_shard_of_one_of_two_replicas_is_survived(shop: Workshop, at: int) -> None:
    survived(struck(shop, 4, at=at, **SHARDED), 4, "SIGKILL")


@pytest.mark.parametrize(
    ("worker", "by", "left"),
    [
        (0, "SIGKILL", "no engine is left"),
        pytest.param(0, "SIGSTOP", "no engine is left", marks=pytest.mark.slow),
        pytest.param(1, "SIGKILL", "no replica is left", marks=pytest.mark.wide),
        pytest.param(1, "SIGSTOP", "no replica is left", marks=pytest.mark.slow),
    ],
)
def test_the_last_one_ends_the_run_which_goes_on_exactly(
    shop: Workshop, undisturbed: Path, worker: int, by: str, left: str
) -> None:
    config = struck(shop, worker, by, deterministic=True, **ONE_AND_ONE)
    with pytest.raises(WorkerError, match=rf"^worker {worker} died: .*; {left}") as caught:
        run(config)
    assert len(str(caught.value).splitlines()) == 1
    folder, _ = run(config, resume=True)
    assert times_trained(folder) == ONCE
    assert kept_samples(folder) == kept_samples(undisturbed)
    last = f"checkpoint-{checkpoints(undisturbed)[-1]}"
    assert weights_digest(folder / last) == weights_digest(undisturbed / last)


def first(folder: Path) -> list[tuple[Any, ...]]:
    """What the first step kept: later weights may differ in the last bits."""
    return [row for row in kept_samples(folder) if row[0] == 0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("wide"), rows=ROWS)
    shop.model = write_wide_model(shop.folder / "wide")
    return shop


VLLM: dict[str, Any] = {"kind": "vllm", "max_running": 16, "kv_tokens": 2048, "tensor_parallel": 2}
PAIRS: dict[str, Any] = {
    "devices": CPU | {"per_node": 4},
    "trainer": {"kind": "fsdp", "shard": 2},
    "engine": VLLM,
}


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize("by", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSTOP"])
@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(2, id="lead", marks=pytest.mark.slow),
        pytest.param(3, id="member"),
        pytest.param(7, id="shard"),
    ],
)
def test_one_of_two_engines_or_replicas_of_two_is_survived(
    wide: Workshop, worker: int, by: str
) -> None:
    survived(struck(wide, worker, by, **PAIRS), worker, by)


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize(
    "worker",
    [pytest.param(1, id="member", marks=pytest.mark.slow), pytest.param(2, id="shard")],
)
def test_the_last_of_two_ends_the_run(wide: Workshop, worker: int) -> None:
    settings: dict[str, Any] = PAIRS | {"devices": CPU | {"per_node": 2}}
    config = struck(wide, worker, **settings)
    left = "no engine is left" if worker == 1 else "no replica is left"
    with pytest.raises(WorkerError, match=rf"^worker {worker} died: exit code -9; {left}"):
        run(config)
    folder, _ = run(config, resume=True)
    assert times_trained(folder) == ONCE


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize(
    "worker",
    [pytest.param(1, id="apart"), pytest.param(5, id="together", marks=pytest.mark.slow)],
)
def test_devices_that_a_planner_regroups_are_lost_together(wide: Workshop, worker: int) -> None:
    """Engines of one are workers 0 to 3, those of two 4 to 7: half of the devices go."""
    planned = {"kind": "vllm", "max_running": 16, "kv_tokens": 256}
    settings: dict[str, Any] = PAIRS | {"engine": planned, "rollout__planner": "paper"}
    folder = survived(
        struck(wide, worker, at=9, rollout__num_generations=8, **settings), worker, "SIGKILL"
    )
    assert "EngineFormed" in (folder / "journal.jsonl").read_text(encoding="utf-8")
