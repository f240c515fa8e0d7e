"""Where workers run: several on one GPU share its memory."""

from pathlib import Path

import pytest
from runtime_jobs import Workshop, metrics, run

from rollpacker.config import DevicesConfig, MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.runtime.cluster.devices import place_devices
from rollpacker.train.model.loading import load_model


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
    devices = DevicesConfig(per_node=count, per_gpu=per_gpu)
    assert [device for device, _ in place_devices(devices, gpus)] == places


def test_more_workers_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices\.per_node is 3 but .* devices\.per_gpu=2"):
        place_devices(DevicesConfig(per_node=3, per_gpu=2), 1)


def test_a_run_on_the_cpu_has_no_workers_per_gpu(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=2)
    with pytest.raises(ValueError, match=r"devices\.per_gpu is 2 but the run is on the CPU"):
        run(shop.config("two", devices__per_node=2, devices__per_gpu=2))


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
    devices = {"per_node": 2, "per_gpu": 2, "kind": "cuda"}
    folder, _ = run(shop.config("two", "exact", devices=devices, epochs=1))
    assert {row["policy_version_max_lag"] for row in metrics(folder)} == {0}
