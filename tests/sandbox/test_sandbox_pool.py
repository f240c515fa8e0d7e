"""Zygotes: shared, replaced when they die, ended with the trainer; nothing is left open."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from rollpacker.sandbox import LEVELS, Level, Sandbox, SandboxUnavailableError, StdinTest
from rollpacker.sandbox import sandbox as pool
from rollpacker.sandbox.grading.grade import judge
from rollpacker.sandbox.running import Zygote, ZygoteDiedError, execute
from rollpacker.sandbox.types import Limits
from waiting import alive, children, until

ADD = "print(sum(map(int, input().split())))"
LOOP = "while True: pass"
EMPTY = StdinTest(stdin="", stdout="")


def add(sandbox: Sandbox, a: int, b: int) -> str:
    test = StdinTest(stdin=f"{a} {b}\n", stdout=f"{a + b}\n")
    return sandbox.run(ADD, [test], 2.0).verdict


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [each for child in found for each in descendants(child)]


def test_threads_share_the_zygotes(level: Level) -> None:
    with Sandbox(level, zygotes=2, check=False) as sandbox, ThreadPoolExecutor(5) as threads:
        jobs = [threads.submit(add, sandbox, n, n) for n in range(60)]
        assert {job.result() for job in jobs} == {"pass"}


def test_two_that_want_to_be_alone_do_not_wait_for_each_other(level: Level) -> None:
    program = "import time\nwhile time.process_time() < 0.105: pass"
    with Sandbox(level, zygotes=2, check=False) as sandbox, ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(sandbox.run, program, [EMPTY], 0.1) for _ in range(3)]
        assert {job.result(timeout=60).verdict for job in jobs} == {"tle_cpu"}


def test_a_dead_zygote_is_replaced_and_its_test_run_again(level: Level) -> None:
    before = set(descendants(os.getpid()))
    with Sandbox(level, check=False) as sandbox:
        for pid in set(descendants(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
        assert add(sandbox, 1, 2) == "pass"


def test_a_zygote_that_dies_in_the_middle_costs_no_verdict(level: Level) -> None:
    before = set(descendants(os.getpid()))
    program = "import time\ntime.sleep(0.5)\nprint(sum(map(int, input().split())))"
    test = StdinTest(stdin="1 2", stdout="3")
    with Sandbox(level, check=False) as sandbox, ThreadPoolExecutor(1) as threads:
        job = threads.submit(sandbox.run, program, [test], 2.0)
        time.sleep(0.2)
        started = set(descendants(os.getpid())) - before
        zygote = min(started)
        os.kill(zygote, signal.SIGKILL)
        assert job.result(timeout=30).verdict == "pass"
        until(lambda: not any(map(alive, started)), within_s=10.0)


def test_a_zygote_that_keeps_dying_is_an_infrastructure_error(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox(level, check=False) as sandbox:

        def fork(*_: object) -> int:
            raise ZygoteDiedError

        monkeypatch.setattr(Zygote, "fork", fork)
        found = sandbox.run(ADD, [EMPTY], 1.0)
        assert (found.verdict, found.tests[0].detail) == ("infra", "the fork server died")


def test_a_sandbox_that_is_closed_while_programs_run_says_so(level: Level) -> None:
    sandbox = Sandbox(level, check=False)
    with ThreadPoolExecutor(2) as threads:
        # One runs, the other waits for the zygote.
        jobs = [threads.submit(sandbox.run, LOOP, [EMPTY], 60.0) for _ in range(2)]
        time.sleep(0.3)
        sandbox.close()
        for job in jobs:
            with pytest.raises(SandboxUnavailableError, match=r"^the sandbox is closed$"):
                job.result(timeout=30)
    with pytest.raises(SandboxUnavailableError, match=r"^the sandbox is closed$"):
        add(sandbox, 1, 2)
    assert sandbox.deaths == 0


def test_closing_at_any_moment_gives_a_verdict_or_says_so(level: Level) -> None:
    for delay_s in (0.0, 0.003, 0.01, 0.02):
        sandbox = Sandbox(level, check=False)
        with ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(add, sandbox, n, n) for n in range(100)]
            time.sleep(delay_s)
            sandbox.close()
            errors = [job.exception(timeout=30) for job in jobs]
        assert {str(error) for error in errors if error} <= {"the sandbox is closed"}
        assert errors[-1] is not None


def test_a_forked_process_is_told_to_make_its_own(sandbox: Sandbox) -> None:
    def use(sent: Connection) -> None:
        try:
            sent.send(add(sandbox, 1, 2))
        except SandboxUnavailableError as error:
            sent.send(str(error))

    received, sent = multiprocessing.Pipe(duplex=False)
    with received, sent:
        process = multiprocessing.get_context("fork").Process(target=use, args=(sent,))
        process.start()
        assert received.poll(20.0), "it waits for a thread that it has not got"
        assert received.recv() == (
            "a sandbox works only in the process that made it: make one after the fork"
        )
        process.join()
    assert add(sandbox, 1, 2) == "pass"


def test_a_zygote_that_does_not_start_is_not_waited_for_for_ever(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(descendants(os.getpid()))
    with Sandbox(level, check=False) as sandbox:
        monkeypatch.setattr(pool, "_START_S", 0.2)
        idle = threading.Event()
        sandbox._starter.submit(idle.wait, 60.0)  # pyright: ignore[reportPrivateUsage]
        for pid in set(descendants(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxUnavailableError, match=r"^no fork server started in 0\.2 s$"):
            add(sandbox, 1, 2)
        idle.set()
        monkeypatch.undo()
        assert add(sandbox, 1, 2) == "pass"


def test_a_child_that_cannot_be_set_up_is_an_infrastructure_error(level: Level) -> None:
    zygote = Zygote(level)
    with open(os.devnull, "r+b") as file:
        os.close(zygote.fork([file.fileno()] * 2, (1 << 28, 1, 1 << 20, 0)))
        exited = zygote.wait(30.0)
        assert exited is not None
        assert os.waitstatus_to_exitcode(exited.status) == 1
        found = execute(zygote, b"not a job", b"", Limits(), 1.0)
    zygote.close()
    # Once it is set up, what goes wrong is the program's.
    assert (found.end, found.code) == ("exit", 1)
    failed = replace(found, end="no_start", stderr=b"OSError")
    assert judge(EMPTY, failed).verdict == "infra"
    assert judge(EMPTY, failed).detail == "the child failed: OSError"


def test_limits_of_the_trainer_that_are_lower_are_kept(level: Level) -> None:
    code = (
        "import resource\n"
        "from rollpacker.sandbox import Limits, Sandbox, StdinTest\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"with Sandbox({level!r}, check=False) as s:\n"
        "    found = s.run('print(3)', [StdinTest(stdin='', stdout='3')], 1.0)\n"
        "print(found.verdict)\n"
    )
    assert python(code) == "pass\n"


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_nothing_is_left_when_it_closes(level: Level) -> None:
    before = set(descendants(os.getpid()))
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with Sandbox(level, zygotes=2) as sandbox:
        assert add(sandbox, 1, 1) == "pass"
        assert sandbox.run(LOOP, [EMPTY], 0.05).verdict == "tle_cpu"
        started = sorted(set(descendants(os.getpid())) - before)
        assert len(started) >= 2
    until(lambda: not any(map(alive, started)), within_s=10.0)
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_nothing_is_left_when_the_trainer_is_killed(level: Level) -> None:
    code = (
        "import os, threading\n"
        "from rollpacker.sandbox import Sandbox, StdinTest\n"
        f"s = Sandbox({level!r}, check=False)\n"
        "t = threading.Timer(0.5, lambda: print('running', flush=True)); t.start()\n"
        f"s.run({LOOP!r}, [StdinTest(stdin='', stdout='')], 60.0)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "running\n"
    started = descendants(trainer.pid)
    assert len(started) >= 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until(lambda: not any(map(alive, started)), within_s=10.0)


@pytest.mark.parametrize("each", LEVELS)
def test_a_stopped_zygote_is_not_left_when_the_trainer_is_killed(each: Level, level: Level) -> None:
    if LEVELS.index(each) < LEVELS.index(level):
        pytest.skip("does not work on this machine")
    code = (
        "from rollpacker.sandbox import Sandbox\n"
        f"s = Sandbox({each!r}, check=False)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        started = descendants(trainer.pid)
        assert started
        for pid in started:
            os.kill(pid, signal.SIGSTOP)
        trainer.kill()
    until(lambda: not any(map(alive, started)), within_s=10.0)


def test_zygotes_outlive_the_threads_that_need_them(level: Level) -> None:
    with ThreadPoolExecutor(1) as thread:
        sandbox = thread.submit(Sandbox, level, check=False).result()
    with sandbox:
        time.sleep(0.1)
        assert add(sandbox, 1, 2) == "pass"
        assert sandbox.deaths == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into a zygote")
def test_a_zygote_knows_nothing_of_the_trainer(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "sesame")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    before = set(descendants(os.getpid()))
    with Sandbox(level, check=False):
        for pid in set(descendants(os.getpid())) - before:
            with open(f"/proc/{pid}/environ", "rb") as file:
                assert b"sesame" not in file.read()
            assert len(os.listdir(f"/proc/{pid}/fd")) <= 6
    os.close(read)
    os.close(write)


WITHOUT_A_CALL = """
import os, struct
from rollpacker.sandbox import Sandbox, SandboxUnavailableError
from rollpacker.sandbox.guest.lockdown import kernel
number = {numbers}[os.uname().machine]
program = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000))
kernel.no_new_privileges()
kernel.SeccompFilter(b"".join(struct.pack("=HBBI", *each) for each in program)).install()
try:
    Sandbox("{level}")
except SandboxUnavailableError as error:
    print(error)
with Sandbox("{level}", allow_weaker=True) as sandbox:
    print(sandbox.level)
"""


def test_where_namespaces_are_denied_strong_is_refused() -> None:
    """As in a container; a weaker level is only taken when it is asked for."""
    numbers = {"x86_64": 272, "aarch64": 97}
    refusal, level = python(WITHOUT_A_CALL.format(numbers=numbers, level="strong")).splitlines()
    assert refusal == (
        "sandbox level 'strong' does not work on this machine: [Errno 1] unshare: "
        "Operation not permitted: choose a weaker level"
    )
    assert level in LEVELS[1:]


def test_where_landlock_is_missing_only_basic_is_left() -> None:
    numbers = {"x86_64": 444, "aarch64": 444}
    refusal, level = python(WITHOUT_A_CALL.format(numbers=numbers, level="standard")).splitlines()
    assert "level 'standard' does not work on this machine: [Errno 1] Landlock" in refusal
    assert level == "basic"


def test_a_weaker_level_is_warned_of_and_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyBasic(Zygote):
        def __init__(self, level: Level) -> None:
            if level != "basic":
                raise SandboxUnavailableError(level)
            super().__init__(level)

    monkeypatch.setattr(pool, "Zygote", OnlyBasic)
    with pytest.warns(UserWarning, match="runs at level 'basic', not 'strong'"):
        sandbox = Sandbox("strong", allow_weaker=True, check=False)
    with sandbox:
        assert sandbox.run(ADD, [EMPTY], 1.0).level == "basic"


def test_interrupted_runs_leave_a_working_sandbox(level: Level) -> None:
    with Sandbox(level, check=False) as sandbox:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGALRM, interrupt)
        assert threading.current_thread() is threading.main_thread()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                sandbox.run(LOOP, [EMPTY], 60.0)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert add(sandbox, 3, 4) == "pass"
