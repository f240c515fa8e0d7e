"""What Linux alone has is not needed, or is said to be in one line."""

import os
import sys
from pathlib import Path

import pytest
from runtime_jobs import Workshop, run

from rollpacker.cli import main
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.rollmux.service.client.client import PhasePermit
from rollpacker.rollmux.service.job.phase_job import place
from rollpacker.runtime.attempts.rewards import Rewards
from rollpacker.runtime.cluster.devices import worker_devices


@pytest.fixture
def no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    # Python 3.13's, which on Linux asks for the affinity.
    monkeypatch.setattr(os, "process_cpu_count", os.cpu_count, raising=False)


@pytest.mark.usefixtures("no_affinity")
def test_a_run_needs_no_affinity(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=4)
    config = shop.config("run", steps=1, devices__per_node=2, devices__pin=True)
    assert worker_devices(config) == [("cpu", ()), ("cpu", ())]
    folder, _ = run(config)
    assert (folder / "checkpoint-1").is_dir()


@pytest.mark.usefixtures("no_affinity")
def test_cores_of_shared_nodes_are_refused_in_one_line() -> None:
    permit = PhasePermit(token=1, phase="rollout", nodes=("r0",), stop_at=0.0, lease_s=1.0, job="a")
    with pytest.raises(ValueError, match=r"^mux\.cores needs Linux, this is "):
        place([os.getpid()], permit, {"rollout": [0]})


def test_programs_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"^rewards: 'code' needs Linux, this is darwin$"):
        Rewards([RewardConfig(function="code")], GradingConfig(), None)
    monkeypatch.setattr(sys, "argv", ["rollpacker", "sandbox", "selftest"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capfd.readouterr().err == "rollpacker: the sandbox needs Linux, this is darwin\n"
