"""Where workers have all cores, the driver takes its time from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker.sim.recorded.run_record import shared_cores


@pytest.mark.parametrize(
    ("cores", "shared"),
    [({"all": 2, "workers": 2}, 2), ({"all": 4, "workers": 2}, 0), ({}, 0), (None, 0)],
)
def test_cores_are_shared_where_workers_have_all(
    tmp_path: Path, cores: dict[str, Any] | None, shared: int
) -> None:
    summary = {} if cores is None else {"cores": cores}
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert shared_cores(tmp_path) == shared
    assert shared_cores(tmp_path / "of an earlier version") == 0
