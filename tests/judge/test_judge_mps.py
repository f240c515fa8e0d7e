"""The MPS helper against a program that behaves as NVIDIA's: a daemon, a pipe folder, commands."""

import os
import sys

import pytest

from rollpacker.cli import main
from rollpacker.reward.judge import mps

FAKE = """#!/bin/sh
pipe="${CUDA_MPS_PIPE_DIRECTORY:-$DEFAULT_PIPE}"
if [ "$1" = "-d" ]; then
    if [ -n "$REFUSE" ]; then echo "Permission denied" >&2; exit 1; fi
    sleep 60 &
    echo $! > "$pipe/pid"
    exit 0
fi
read command
if [ ! -f "$pipe/pid" ]; then echo "Cannot find MPS control daemon process" >&2; exit 1; fi
echo "$command" >> "$pipe/commands"
if [ "$command" = quit ]; then kill $(cat "$pipe/pid"); rm "$pipe/pid"; fi
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    default = tmp_path / "default"
    default.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DEFAULT_PIPE", str(default))
    return tmp_path


@pytest.mark.parametrize("own_folder", [True, False])
def test_a_daemon_is_started_used_and_stopped(fake, own_folder):
    folder = fake / "mps" if own_folder else None
    pipe = folder / "pipe" if folder else fake / "default"
    assert mps.start(folder) is True
    assert mps.is_running(folder)
    assert (pipe / "pid").exists()
    assert bool(mps.environment(folder)) == own_folder
    mps.stop(folder)
    assert not mps.is_running(folder)
    assert (pipe / "commands").read_text().split()[-1] == "quit"


def test_a_daemon_that_runs_already_is_left_alone(fake):
    assert mps.start() is True
    pid = (fake / "default" / "pid").read_text()
    assert mps.start() is False
    assert mps.is_running()
    assert (fake / "default" / "pid").read_text() == pid
    mps.stop()
    assert not mps.is_running()


def test_a_refusal_says_what_to_do(fake, monkeypatch):
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(mps.MpsError, match=r"Permission denied.*may need root.*without it"):
        mps.start(fake / "mps")
    with pytest.raises(mps.MpsError, match="cannot be stopped"):
        mps.stop(fake / "mps")


def test_a_missing_program_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (mps.is_running, mps.start, mps.stop):
        with pytest.raises(mps.MpsError, match="no nvidia-cuda-mps-control on PATH"):
            call()


def test_the_command_line(fake, monkeypatch, capfd):
    def said(*words):
        monkeypatch.setattr(sys, "argv", ["rollpacker", "mps", *words])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        return left.value.code, out.strip() or err.strip()

    assert said("status", "--json") == (0, '{"state": "stopped"}')
    assert said("start") == (0, "CUDA MPS: started")
    assert said("start") == (0, "CUDA MPS: running")
    assert said("stop") == (0, "CUDA MPS: stopped")
    code, error = said("stop")
    assert code == 1
    assert "CUDA MPS cannot be stopped" in error
