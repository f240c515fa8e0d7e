"""Which devices a run finds."""

from pathlib import Path

import pytest
import torch

from rollpacker.runtime.cluster import devices


@pytest.mark.parametrize("driver", ["nvidiactl", "dxg"])
def test_a_driver_of_linux_or_wsl_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
) -> None:
    places = tuple(str(tmp_path / Path(each).name) for each in devices._DRIVERS)
    monkeypatch.setattr(devices, "_DRIVERS", places)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices._gpu_count() == 0
    (tmp_path / driver).touch()
    assert devices._gpu_count() == 2
