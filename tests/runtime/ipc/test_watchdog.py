"""Who is stopped when a lease runs out."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rollpacker.runtime.ipc.watchdog import follow, send
from rollpacker.runtime.ipc.watchdog_client import Watchdog
from waiting import until

LAST = Path("/proc/sys/kernel/ns_last_pid")


def sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(process: subprocess.Popen[bytes], stopped: bool) -> None:
    until(lambda: (state(process) == "T") == stopped)


def test_processes_run_until_their_time_is_over_and_end_with_the_driver() -> None:
    first, other = sleeping(), sleeping()
    guard = Watchdog()
    guard.tell([first.pid, other.pid, 0], time.monotonic() - 1.0)
    becomes(first, True)
    becomes(other, True)
    guard.tell([first.pid], None)
    becomes(first, False)
    assert state(other) == "T"
    assert guard._process.stdin is not None
    guard._process.stdin.close()  # as when the driver is gone
    assert first.wait() == -signal.SIGKILL
    assert state(other) == "T"
    other.kill()
    other.wait()
    guard._process.wait()


def test_whoever_has_the_number_of_one_that_ended_is_left_alone() -> None:
    before = sleeping()
    ends: dict[int, int] = {}
    follow(ends, [before.pid])
    before.kill()
    before.wait()
    after = None
    for _ in range(20):
        try:
            LAST.write_text(str(before.pid - 1))
        except OSError:
            pytest.skip("numbers of processes cannot be chosen here")
        after = sleeping()
        if after.pid == before.pid:
            break
        after.kill()
        after.wait()
    else:
        pytest.skip("the number was taken")
    follow(ends, [after.pid])
    send(ends, signal.SIGKILL)
    os.kill(after.pid, signal.SIGTERM)
    assert after.wait() == -signal.SIGTERM
