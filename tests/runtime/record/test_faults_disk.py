"""A disk that is full while a job runs: a limit on the size of files does the same to it."""

import json
import os
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_files import child
from runtime_jobs import Workshop, checkpoints, cli, cli_here, metrics, times_trained
from torch.distributed.checkpoint.api import CheckpointException

from rollpacker.durable import disk_full
from rollpacker.train.state.checkpoint import save_state

LARGEST = 60_000
"""Bytes: less than a checkpoint's weights, more than the lines of a short run."""


def full_disk() -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (LARGEST, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


FILL = """
import resource

def fill(completions, largest, **_):
    for pid in [driver(), *workers()]:
        most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, most))
    return ones(completions)
"""
"""A reward with which the disk is full from the first step on."""


@pytest.fixture
def room_at_the_end() -> Iterator[None]:
    """This process may write again what it could write before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("room_at_the_end")
def test_a_run_goes_on_until_its_last_checkpoint_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(tmp_path, rows=5)
    shop.rewards.write_text(shop.rewards.read_text() + FILL)
    fill = {"function": f"{shop.rewards}:fill", "options": {"largest": LARGEST}}
    changes = {"epochs": 1, "devices__per_node": 1, "checkpoint": {"every": 1}}
    done = cli_here("train", shop.file("full", **changes, rewards=[fill]), "--json")
    folder = tmp_path / "full"
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert last.startswith(f"rollpacker: {folder}: the last checkpoint cannot be written")
    assert "--resume auto" in last
    said = "checkpoint-1: no space left: free some or change 'output'"
    assert any(said in line and "the run goes on without it" in line for line in before)
    assert "Traceback" not in done.stderr + capfd.readouterr().err
    assert len(metrics(folder)) == 2
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(5)})
    assert checkpoints(folder) == []
    assert list(folder.glob(".tmp-*")) == []


@pytest.mark.slow
def test_it_is_resumed_when_there_is_room(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=5)
    file = shop.file("full", epochs=1, devices__per_node=1, checkpoint={"every": 1})
    folder = tmp_path / "full"
    cli("train", file, preexec_fn=full_disk)
    done = cli_here("train", file, "--resume", "auto", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompts_trained"] == 5
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(5)})
    assert checkpoints(folder) == [1, 2]


def test_what_torch_says_of_a_full_disk_is_understood(tmp_path: Path) -> None:
    """Of a file that cannot grow it says that the position is unexpected, nothing more."""

    def save() -> None:
        full_disk()
        with pytest.raises(CheckpointException) as raised:
            save_state(tmp_path / "state", {"exp_avg": {"a": torch.zeros(100_000)}})
        assert disk_full(raised.value, tmp_path)

    assert child(save) == 0
    assert not disk_full(ValueError("unexpected pos"), tmp_path)
    assert not list(tmp_path.glob(".tmp-probe"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 2_000, 20_000, 60_000, 150_000, 300_000, 500_000])
def test_a_disk_that_fills_up_anywhere(tmp_path: Path, small_disk: Path, room: int) -> None:
    """From no byte for the lock to room for one checkpoint: lines, and what is kept is whole."""
    shop = Workshop(tmp_path / "shop", rows=5)
    file = shop.file("full", epochs=1, devices__per_node=1, checkpoint={"every": 1})
    block = os.statvfs(small_disk).f_frsize
    free = os.statvfs(small_disk).f_bavail * block - room // block * block
    (small_disk / "filler").write_bytes(b"x" * free)
    done = cli("train", file, f"output={small_disk / 'run'}", "--json", timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1, done.stderr
    assert "no space left" in done.stderr.lower()
    (small_disk / "filler").unlink()
    resumed = cli_here("train", file, f"output={small_disk / 'run'}", "--resume", "auto", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["prompts_trained"] == 5
