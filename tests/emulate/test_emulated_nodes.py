"""Emulated devices on the nodes of a cluster, all of them on this machine."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from cluster_jobs import Launcher, on
from emulated_jobs import job
from ray_nodes import ray_nodes
from rich.console import Console

from rollpacker import job as jobs
from rollpacker.config import RunConfig
from rollpacker.core import journal
from rollpacker.emulate.twin import simulate
from rollpacker.policy.rollout import from_journal
from rollpacker.report.reading.run_folder import load_run
from rollpacker.runtime.record.progress import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
FOUR: dict[str, Any] = {"devices__per_node": 2, "devices__nodes": 4, "trainer__shard": 2}
"""Nodes of an engine and a replica each, as many as the one machine of ``HERE`` has."""
HERE: dict[str, Any] = {"trainer__shard": 2}


def train(config: RunConfig, progress: type[Progress] = Progress) -> tuple[Path, str]:
    said = StringIO()
    folder = jobs.train(config, progress=progress(Console(file=said, width=400)))
    return folder, said.getvalue()


def kept(folder: Path) -> dict[int, dict[str, int]]:
    """Kept tokens of each prompt, by step."""
    samples = load_run(folder).samples.filter(state="kept")
    tokens = samples.group_by("step", "prompt").agg(pl.col("tokens").sum())
    found: dict[int, dict[str, int]] = {}
    for step, prompt, count in tokens.iter_rows():
        found.setdefault(step, {})[prompt] = count
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one machine."""
    return train(job(tmp_path_factory.mktemp("here"), **HERE))[0]


def test_agents_start_emulated_devices(tmp_path: Path, here: Path) -> None:
    launcher = Launcher()
    with on(launcher):
        folder, said = train(job(tmp_path, **FOUR, devices__layout="colocated"))
    assert "EMULATED, 8 devices" in said
    assert kept(folder) == kept(here)
    assert {s.step: s.kept_tokens for s in simulate(folder)} == {
        step: sum(tokens.values()) for step, tokens in kept(here).items()
    }
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    assert "8 emulated devices" in (folder / "report.html").read_text()
    assert all(agent.returncode is not None for agent in launcher.agents)


# Nodes of real runs are lost, and Ray places real workers, in test_cluster_runs and test_ray.
@pytest.mark.slow
def test_a_lost_node_takes_its_devices_along(tmp_path: Path) -> None:
    launcher = Launcher()

    class Assassin(Progress):
        """Kills a node's agent when the first step is over."""

        def step(self, metrics: Any) -> None:
            super().step(metrics)
            if self._done == 1:
                for process in launcher.agent(3).children(recursive=True):
                    process.kill()
                launcher.agent(3).kill()

    with on(launcher):
        folder, said = train(job(tmp_path, "race", **FOUR), Assassin)
    assert "is gone" in said or "on node 3" in said
    samples = load_run(folder).samples.filter(state="kept")
    assert samples.height == 24 * 4
    assert set(samples.filter(step=2)["worker"]) <= {0, 1, 2}


@pytest.mark.slow
def test_ray_places_emulated_devices(tmp_path: Path, here: Path) -> None:
    with ray_nodes(4) as cluster:
        config = job(tmp_path, **FOUR, cluster={"address": cluster.address})
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        command = [sys.executable, "-m", "rollpacker", "train", str(path)]
        subprocess.run(command, check=True, timeout=150)
    folder = Path(config.output)
    assert kept(folder) == kept(here)
    assert json.loads((folder / "summary.json").read_text())["emulated"]["factor"] == 2000.0
