"""A disk that is full while a job runs: a limit on the size of files does the same to it."""

import json
import resource
from collections import Counter
from pathlib import Path

import pytest
from runtime_jobs import Workshop, checkpoints, cli, metrics, times_trained

LARGEST = 60_000
"""Bytes: less than a checkpoint's weights, more than the lines of a short run."""


def full_disk() -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (LARGEST, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def test_a_run_goes_on_until_its_last_checkpoint_is_lost(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=5)
    file = shop.file("full", epochs=1, workers__count=1, checkpoint={"every": 1})
    done = cli("train", file, "--json", preexec_fn=full_disk)
    folder = tmp_path / "full"
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert last.startswith(f"rollpacker: {folder}: the last checkpoint cannot be written")
    assert "--resume auto" in last
    said = "checkpoint-1: no space left; free some or change 'output'"
    assert any(said in line and "the run goes on without it" in line for line in before)
    assert "Traceback" not in done.stderr
    assert len(metrics(folder)) == 2
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(5)})
    assert checkpoints(folder) == []
    assert list(folder.glob(".tmp-*")) == []


@pytest.mark.slow
def test_it_is_resumed_when_there_is_room(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=5)
    file = shop.file("full", epochs=1, workers__count=1, checkpoint={"every": 1})
    folder = tmp_path / "full"
    cli("train", file, preexec_fn=full_disk)
    done = cli("train", file, "--resume", "auto", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompts_trained"] == 5
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(5)})
    assert checkpoints(folder) == [1, 2]
