"""A process of emulated devices dies in a run, as a node would."""

import multiprocessing
from io import StringIO
from pathlib import Path

import pytest
from emulated_jobs import job, write_devices
from rich.console import Console

from rollpacker import job as jobs
from rollpacker.report.reading.run_folder import load_run
from rollpacker.runtime.record.metrics import Metrics
from rollpacker.runtime.record.progress import Progress


class Assassin(Progress):
    """Kills one of two processes when the first step is over."""

    def step(self, metrics: Metrics) -> None:
        super().step(metrics)
        children = {child.name: child for child in multiprocessing.active_children()}
        if self._done == 1:
            children["emulated-1"].kill()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "race"])
def test_the_rest_goes_on(tmp_path: Path, mode: str) -> None:
    path = write_devices(tmp_path / "two.yaml", processes=2, factor=500.0)
    said = StringIO()
    config = job(tmp_path, mode, devices__emulate=str(path))
    folder = jobs.train(config, progress=Assassin(Console(file=said, width=400)))
    assert said.getvalue().count("died: exit code -9") >= 3, said.getvalue()
    samples = load_run(folder).samples
    kept = samples.filter(state="kept")
    groups = kept.group_by("step", "prompt").len()
    assert set(groups["len"]) == {4}
    assert groups["prompt"].is_unique().all()
    assert groups.height == 24
    assert set(kept.filter(step=2)["worker"]) <= {0, 1}
