"""Where workers run: several on one GPU share its memory."""

from pathlib import Path

import pytest
from runtime_jobs import Workshop, metrics, run

from rollpacker.config import MiniEngineConfig, WorkersConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.runtime.devices import place_workers
from rollpacker.train.model import load_model


@pytest.mark.parametrize(
    ("count", "per_gpu", "gpus", "places"),
    [
        (0, 1, 2, ["cuda:0", "cuda:1"]),
        (0, 2, 1, ["cuda:0", "cuda:0"]),
        (0, 2, 2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        (3, 2, 2, ["cuda:0", "cuda:0", "cuda:1"]),
    ],
)
def test_workers_fill_one_gpu_after_the_other(
    count: int, per_gpu: int, gpus: int, places: list[str]
) -> None:
    workers = WorkersConfig(count=count, per_gpu=per_gpu)
    assert [device for device, _ in place_workers(workers, gpus)] == places


def test_more_workers_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"workers\.count is 3 but .* workers\.per_gpu=2"):
        place_workers(WorkersConfig(count=3, per_gpu=2), 1)


def test_a_run_on_the_cpu_has_no_workers_per_gpu(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=2)
    with pytest.raises(ValueError, match=r"workers\.per_gpu is 2 but the run is on the CPU"):
        run(shop.config("two", workers__count=2, workers__per_gpu=2))


def test_a_sharer_finds_its_kv_budget_in_its_share(tmp_path: Path) -> None:
    """On a CPU it is the machine's memory; what others take meanwhile is no matter."""
    shop = Workshop(tmp_path, rows=2)
    model, _ = load_model(shop.config("one").model, "cpu")
    config = MiniEngineConfig(max_running=1)
    alone, shared = (MiniEngine(model, config=config, sharers=n)._runner for n in (1, 4))
    assert shared.free_bytes(4) == pytest.approx(alone.free_bytes(1) / 4, rel=0.2)


@pytest.mark.gpu
def test_two_workers_train_on_one_gpu(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    workers = {"count": 2, "per_gpu": 2, "device": "cuda"}
    folder, _ = run(shop.config("two", "exact", workers=workers, epochs=1))
    assert {row["policy_version_max_lag"] for row in metrics(folder)} == {0}
