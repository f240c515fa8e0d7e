import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from checkpoint_files import child, intact, save, saved, writer

from rollpacker.runtime.record.checkpoint import Checkpoints, search, verify

TRACED = ("runtime/record/checkpoint.py", "durable.py", "/shutil.py")


def trace_lines(at_line):
    """Call ``at_line(count)`` before each executed line of the save, in every thread."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            count += 1
            at_line(count)
        return tracer

    threading.settrace(tracer)
    sys.settrace(tracer)


def kill_at(line):
    def at_line(count):
        if count == line:
            os.kill(os.getpid(), signal.SIGKILL)

    trace_lines(at_line)


def killed_save(run, step, line):
    checkpoints = Checkpoints(run)

    def act():
        kill_at(line)
        seed = step + 100 * (step == 2)
        save(checkpoints, step, writer(seed), {"seed": seed})

    return child(act)


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is one: a kill loses nothing that was not synced."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def serve():
    for line in sys.stdin:
        run, step, at = json.loads(line)
        print(killed_save(Path(run), step, at), flush=True)


@pytest.fixture(scope="module")
def kill():
    """``killed_save`` from a small process: a fork of all that pytest has imported takes longer."""
    support = Path(__file__).parents[1] / "support"
    code = f"import sys; sys.path.append({str(support)!r}); "
    code += "import test_checkpoint_kills as kills; kills.serve()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=Path(__file__).parent, **pipes) as server:
        assert server.stdout is not None
        answers = iter(server.stdout)

        def ask(*request):
            print(json.dumps(request), file=server.stdin, flush=True)
            return int(next(answers))

        yield ask


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [3, 2], ids=["new", "replaced"])
def test_kill_at_lines_of_save(memory, kill, step, stride):
    base = memory / "base"
    saved(base, 1, 2)
    outcomes = set()
    for line in range(1, 10_000, stride):
        run = shutil.copytree(base, memory / "run")
        code = kill(str(run), step, line)
        good = [p for p in run.glob("checkpoint-*") if verify(p) is None]
        assert len(good) >= 2 or step == 2, line
        checkpoints = Checkpoints(run)
        found = checkpoints.latest()
        assert all(verify(path) is None for path in run.glob("checkpoint-*")), line
        assert found is not None, line
        assert found.step in (2, step), line
        assert intact(found), line
        assert not list(run.glob(".*")), line
        outcomes.add(found.state["seed"])
        again = saved(run, 4).latest()
        assert again is not None
        assert again.step == 4, line
        assert intact(again), line
        shutil.rmtree(run)
        if code == 0:
            break
        assert code == -signal.SIGKILL, line
    assert line > 120
    assert outcomes == ({2, 3} if step == 3 else {2, 102})


@pytest.mark.slow
def test_kill_at_random_times(tmp_path):
    """Hundreds of kills of one run that saves all the time; each start must go on from before."""
    script = (
        "import sys, random; from pathlib import Path\n"
        "from rollpacker.runtime.record.checkpoint import Checkpoints\n"
        "c = Checkpoints(Path(sys.argv[1])); f = c.latest(); s = f.step if f else 0\n"
        "print(s, c.problems, flush=True)\n"
        "while True:\n"
        "    s += 1; b = random.Random(s).randbytes(200000)\n"
        "    c.write(s, lambda p: (p / 'w').write_bytes(b) and None, {'seed': s}); c.commit(s)\n"
        "    print(s, flush=True)\n"
    )
    numbers = random.Random(0)
    last = 0
    for _ in range(200):
        command = [sys.executable, "-c", script, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert int(process.stdout.readline().split()[0]) >= last
        time.sleep(numbers.uniform(0, 0.1))
        process.kill()
        said = [int(line) for line in process.communicate()[0].splitlines()]
        last = max([last, *said])
        found, problems = search(tmp_path)
        assert not problems
        assert last == 0 or (found is not None and found.step >= last)
    assert last > 200
