import os
import signal
import subprocess
import sys

import pytest

from rollpacker.runtime.lock import RunLock


def test_second_run_is_refused(tmp_path):
    with RunLock(tmp_path), pytest.raises(ValueError, match=rf"pid {os.getpid()}\).*'output'"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_lock_is_released_by_a_kill_although_children_live(tmp_path):
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from rollpacker.runtime.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\n"
        "if not os.fork(): print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    orphan = int(process.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"pid {process.pid}"):
            RunLock(tmp_path)
        process.kill()
        process.wait()
        os.kill(orphan, 0)
        RunLock(tmp_path).release()
    finally:
        os.kill(orphan, signal.SIGKILL)
        process.communicate()
