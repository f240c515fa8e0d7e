import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from rollpacker.job.run.lock import RunLock


def test_second_run_is_refused(tmp_path):
    with RunLock(tmp_path), pytest.raises(ValueError, match=rf"pid {os.getpid()}\).*'output'"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_a_run_that_an_agent_starts_waits_for_the_end_of_the_one_before(tmp_path):
    first, said = RunLock(tmp_path), queue.SimpleQueue()
    second = []
    thread = threading.Thread(target=lambda: second.append(RunLock(tmp_path, said.put)))
    thread.start()
    assert f"another run (pid {os.getpid()})" in said.get(timeout=30)
    assert second == []
    first.release()
    thread.join(timeout=30)
    second[0].release()


@pytest.mark.wide
def test_lock_is_released_by_a_kill_although_children_live(tmp_path):
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from rollpacker.job.run.lock import RunLock\n"
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
