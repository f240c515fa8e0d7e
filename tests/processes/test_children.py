"""What a child of the driver keeps from programs that it starts, and what ends with it."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rollpacker.processes.children import kill_child

PARENT = """
import ctypes, os, sys
from rollpacker.processes.children import keep_to_itself
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # as a program of that user begins
if sys.argv[1] == "kept":
    keep_to_itself()
if sys.argv[1] == "forked from":
    import rollpacker.processes.forked_from
if child := os.fork():
    os.waitpid(child, 0)
    sys.exit()
ctypes.CDLL(None).prctl(4, 1)
try:
    print(b"HUNTER" in open(f"/proc/{os.getppid()}/environ", "rb").read())
except PermissionError:
    print("kept")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("how", "said"), [("kept", "kept"), ("forked from", "kept"), ("open", "True")]
)
def test_its_environment_is_read_by_none_of_its_user(how: str, said: str) -> None:
    """The last shows that it is this that keeps it."""
    environment = {**os.environ, "KEY": "HUNTER", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PARENT, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == said, done.stderr


LEADER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"


def test_what_it_has_started_ends_with_it_even_when_it_is_over() -> None:
    pipe = subprocess.PIPE
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=pipe, stdout=pipe, start_new_session=True
    )
    leader.wait(60)
    assert kill_child(leader) == "exited with code 0"
    assert leader.stdout is not None
    assert leader.stdout.read() == b""  # its helper had the other end


@dataclass
class Over:
    """A child that was waited for."""

    pid: int

    def poll(self) -> int:
        return 0

    def wait(self, _timeout: float = 0) -> int:
        return 0

    def kill(self) -> None:
        pass


def test_the_next_process_of_its_number_lives() -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert kill_child(Over(stranger.pid)) == "exited with code 0"
    stranger.communicate(b"on\n", timeout=60)
    assert stranger.returncode == 0
