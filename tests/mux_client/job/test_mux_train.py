"""``rollpacker train`` under permits: the weights are those of the run alone, whatever dies."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mux_real_daemon import COMMAND, Daemon

ROOT = Path(__file__).parents[3]


def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module("benchmarks.mux.two_jobs")


def train(config: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, "train", str(config), "checkpoint.every=1", *words],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_and_a_killed_daemon_change_no_bit(tmp_path: Path) -> None:
    """kill -9 of the run in its middle, then of the daemon; once resumed it ends as if alone."""
    tools, steps = benchmark(), 4
    tools.prepare(tmp_path)
    daemon = Daemon(tmp_path / "mux", ttl=5.0)
    mux = {
        "url": daemon.url,
        "token_file": str(daemon.token_file),
        "job": "run",
        "worst_rollout_s": 5.0,
        "worst_train_s": 5.0,
        "cores": {"rollout": [0], "train": [1]},
    }
    config = tools.write_job(tmp_path, "muxed", 1, steps, mux)
    run = train(config)
    try:
        while len(daemon.finished("run")) < 3:
            assert run.poll() is None
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        run = train(config, "--resume", "auto")
        while len(daemon.finished("run")) < 5:
            assert run.poll() is None
            time.sleep(0.1)
        daemon.kill()
        daemon.start()
        assert run.wait(timeout=280) == 0
        phases = daemon.finished("run")
        assert phases == ["rollout", "train"] * (len(phases) // 2)
        assert len(phases) in (2 * steps, 2 * steps + 2)  # a step may have been made again
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        daemon.stop()
    alone = train(tools.write_job(tmp_path, "alone", 1, steps, {}))
    assert alone.wait(timeout=280) == 0
    last = f"checkpoint-{steps}"
    weights = [
        sorted((tmp_path / each / last).rglob("*.safetensors")) for each in ("muxed", "alone")
    ]
    assert weights[0]
    for one, two in zip(*weights, strict=True):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_jobs_on_two_cores_share_both_nodes_and_change_no_bit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mux.two_jobs", "--json", "--steps", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["identical"] == [True, True]
    assert len(result["shared_nodes"]) == 2
