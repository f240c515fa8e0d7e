"""What is left in shared memory by runs that were killed, and by nobody else."""

import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from runtime_jobs import Workshop, kill_group, start_cli

from rollpacker.runtime.messages import shared_weights
from rollpacker.runtime.messages.shared_weights import MEMORY, SharedMemoryOwner, clear

_OWNER = """
import sys, time
from rollpacker.runtime.messages.shared_weights import SharedMemoryOwner
print(SharedMemoryOwner().name, flush=True)
time.sleep(1000)
"""


def of(name: str) -> list[Path]:
    """Files of a run, wherever they are."""
    return [p for f in (MEMORY, Path(tempfile.gettempdir())) for p in f.glob(f"{name}*")]


def test_names_are_removed_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_weights, "MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("run-[1]-weights-a", "run-[1]-engine-cpushm_0", "run-[2]-weights-a", "run-1-x"):
        (tmp_path / name).touch()
    clear("run-[1]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1-x", "run-[2]-weights-a"]


def test_a_run_removes_what_the_killed_have_left_and_nothing_of_the_living() -> None:
    mine = SharedMemoryOwner()
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    weights = MEMORY / f"{name}-weights-abc"
    weights.touch()
    SharedMemoryOwner().remove()
    assert weights.exists()
    owner.kill()
    owner.communicate()
    SharedMemoryOwner().remove()
    assert not of(name)
    assert of(mine.name)
    mine.remove()
    mine.remove()
    assert not of(mine.name)


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_two_runs_that_start_at_once_keep_what_is_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str
) -> None:
    """The other clears before, or just after, this one has locked what it made."""
    lock, others = fcntl.flock, [shared_weights.clear_dead]

    def clear_between(file: int, how: int) -> None:
        other = others.pop() if others and how == fcntl.LOCK_EX else None
        if other and moment == "open":
            other()
        lock(file, how)
        if other and moment == "flock":
            other()

    monkeypatch.setattr(shared_weights, "MEMORY", tmp_path)
    monkeypatch.setattr(fcntl, "flock", clear_between)
    mine = SharedMemoryOwner()
    assert not others
    assert [path.name for path in tmp_path.iterdir()] == [f"{mine.name}-lock"]
    weights = tmp_path / f"{mine.name}-weights-a"
    weights.touch()
    SharedMemoryOwner().remove()
    assert weights.exists()
    assert mine.folder.is_dir()
    mine.remove()
    assert not [*tmp_path.iterdir(), *of(mine.name)]


@pytest.mark.parametrize("whom", ["driver", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.wide
def test_nothing_of_a_killed_driver_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whom: str
) -> None:
    # A short path: it is a part of sockets' names.
    temporary = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    shop = Workshop(tmp_path)
    devices = {"per_node": 2, "layout": "separate", "training": 1, "pin": False, "kind": "cpu"}
    process = start_cli("train", shop.file("killed", epochs=500, devices=devices))
    name = wait_for(process, temporary, "rollpacker-*")
    wait_for(process, MEMORY, f"{name}-weights")
    workers = psutil.Process(process.pid).children(recursive=True)
    if whom == "driver":
        process.send_signal(signal.SIGKILL)
        process.communicate()
    else:
        kill_group(process)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    # Runs of other tests may have removed them by now; their temporary folder is another one.
    SharedMemoryOwner().remove()
    assert not list(MEMORY.glob(f"{name}*"))
    shutil.rmtree(temporary)


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> str:
    """The name of the first of such files."""
    for _ in range(2400):
        assert process.poll() is None, process.communicate()
        for path in folder.glob(pattern):
            return path.name
        time.sleep(0.05)
    raise TimeoutError(pattern)
