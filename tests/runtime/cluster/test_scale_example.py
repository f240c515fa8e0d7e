"""``examples/scale/cpu-four.yaml``: the layout of eight GPUs, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_jobs import metrics, run

from importing import module_of
from rollpacker import config

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "scale"


def test_its_reward_is_a_share_of_characters() -> None:
    assert module_of(FOLDER / "small.py").digits(["12a ", "", "7"]) == [0.5, 0.0, 1.0]
    assert len({row["id"] for row in module_of(FOLDER / "small.py").rows(64)}) == 64


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module_of(FOLDER / "small.py").write_model(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", f"output={tmp_path / 'run'}", "steps=2"]
    folder, _ = run(config.load(FOLDER / "cpu-four.yaml", given))
    assert len(metrics(folder)) == 2
    assert all(step["policy_version_max_lag"] == 0 for step in metrics(folder))
