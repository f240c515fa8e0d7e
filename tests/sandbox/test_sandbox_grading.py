"""No program is nobody's fault, and none costs the process that grades it more than a moment.

With ``-s``, a table of programs, verdicts and CPU seconds of the grader.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_sandbox_pool import descendants

from rollpacker.sandbox import LEVELS, Level, Limits, Sandbox, StdinTest, Test, parse_test
from rollpacker.sandbox.selftest import Targets, hostile_programs
from waiting import children

CASES = [json.loads(line) for line in Path(__file__).with_name("hostile_cases.jsonl").open()]
# They pass as they should: what they do is allowed, or their asserts are forgeable.
MAY_PASS = {"pass", "fail", "crash", "tle_cpu", "tle_idle"}
WRONG = MAY_PASS - {"pass"}
SLEEPERS = {"sleep_wall", "sleep_beyond", "alarm_exit", "threading_pool"}
# To read 40,000 keys takes 0.13 to 0.21; where their collisions cost, 8 to 15.
MOST_CPU_S = 0.5
LIMITS = Limits(memory_mb=256, output_mb=8, idle_s=0.5)
PRINTS = StdinTest(stdin="", stdout="42\n")

Programs = Iterable[tuple[str, str, Test, float, set[str]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each == "standard" else pytest.mark.wide) for each in LEVELS
    ],
)
def at_level(request: pytest.FixtureRequest, level: Level) -> Iterator[Sandbox]:
    if LEVELS.index(request.param) < LEVELS.index(level):
        pytest.skip("does not work on this machine")
    with Sandbox(request.param, limits=LIMITS, check=False) as made:
        yield made


def wrong(sandbox: Sandbox, programs: Programs) -> list[str]:
    """Those with a verdict that they may not have, or that cost too much."""
    found: list[str] = []
    for name, program, test, budget_s, verdicts in programs:
        took: list[float] = []
        verdict = ""
        for _ in range(3):  # a collection of garbage may come between
            began = time.process_time()
            verdict = sandbox.run(program, [test], budget_s).verdict
            took.append(time.process_time() - began)
            if took[-1] < MOST_CPU_S:
                break
        row = f"{name:32} {sandbox.level:9} {verdict:9} {min(took):.3f}"
        print(row)
        if verdict not in verdicts or min(took) >= MOST_CPU_S:
            found.append(row)
    return found


@pytest.mark.parametrize(("kind", "budget_s"), [("blame", 0.2), ("cost", 5.0)])
def test_no_program_is_nobodys_fault_or_costs_the_grader(
    at_level: Sandbox, kind: str, budget_s: float
) -> None:
    with Targets() as world:
        programs = [each for each in hostile_programs(world) if each.kind == kind]
    assert wrong(at_level, ((p.name, p.program, p.test, budget_s, WRONG) for p in programs)) == []


def test_no_case_is_nobodys_fault_or_costs_the_grader(at_level: Sandbox) -> None:
    def programs() -> Programs:
        for case in CASES:
            name = case["name"]
            budget_s = 0.1 if name in SLEEPERS else 2.0
            yield name, case["program"], parse_test(case["test"]), budget_s, MAY_PASS

    assert wrong(at_level, programs()) == []


def test_the_kernels_own_limit_is_out_of_reach(at_level: Sandbox) -> None:
    """It counts ticks: a program that is awake at each of them seems to run all the time."""
    program = "import resource\nprint(min(resource.getrlimit(resource.RLIMIT_CPU)) > {})"
    longest_s = 10.0 * LIMITS.wall_cap(1.0)
    test = StdinTest(stdin="", stdout="True\n")
    assert at_level.run(program.format(longest_s), [test], 1.0).verdict == "pass"


def test_its_other_limits_are_a_programs_own(sandbox: Sandbox) -> None:
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (200 << 20,) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 25, resource.RLIM_INFINITY))\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0] - (200 << 20) + 42)"
    )
    assert sandbox.run(program, [PRINTS], 1.0).verdict == "pass"


def test_one_that_sleeps_just_before_its_end_is_not_asked_all_the_time(level: Level) -> None:
    program = "import time\nwhile time.process_time() < {}: pass\ntime.sleep(100)"
    slept: list[float] = []
    with Sandbox(level, limits=replace(LIMITS, idle_s=1.0), check=False) as sandbox:
        # Its budget stretches to 0.11. Where the machine is busy, the first ones may be over it.
        for ahead_s in (0.002, 0.003, 0.005, 0.005, 0.005):
            began = time.process_time()
            found = sandbox.run(program.format(0.11 - ahead_s), [PRINTS], 0.1)
            slept += [time.process_time() - began] * (found.verdict == "tle_idle")
            if slept and min(slept) < 0.01:
                return
    assert slept == [], "a thousand questions a second take 0.02 and more"


def killed(sandbox: Sandbox, program: str, idle: set[int], held: int) -> tuple[str, str]:
    """Verdict on a program whose child is killed once it holds so many bytes, every time."""
    done = threading.Event()

    def kill() -> None:
        while not done.is_set():
            for pid in set(descendants(os.getpid())) - idle:
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    if pages * os.sysconf("SC_PAGE_SIZE") > held:
                        os.kill(pid, signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    continue
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = sandbox.run(program, [PRINTS], 5.0)
    finally:
        done.set()
        killer.join()
    return found.verdict, found.tests[0].detail


def test_who_is_killed_while_memory_is_short(level: Level) -> None:
    """A small program is the machine's victim; one that held most of its memory is not."""
    with Sandbox(level, limits=LIMITS, check=False) as sandbox:
        assert sandbox.run("print(42)", [PRINTS], 1.0).verdict == "pass"
        idle = set(descendants(os.getpid()))
        small = "import time\ntime.sleep(30)"
        large = "import time\nx = b'x' * (150 << 20)\ntime.sleep(30)"
        assert killed(sandbox, small, idle, 0) == ("infra", "killed from outside")
        assert killed(sandbox, large, idle, 140 << 20) == ("crash", "out of memory")
        assert sandbox.run("print(42)", [PRINTS], 1.0).verdict == "pass"
        assert sandbox.deaths == 0


def test_a_zygote_that_is_killed_every_time_is_infra(level: Level) -> None:
    # Zygote and child; a pid namespace has a process before them.
    generations = 3 if level == "strong" else 2
    before = set(children(os.getpid()))
    done = threading.Event()

    def kill() -> None:
        while not done.is_set():
            for zygote in set(children(os.getpid())) - before:
                if len(descendants(zygote)) == generations - 1:
                    os.kill(zygote, signal.SIGKILL)
            time.sleep(0.02)

    with Sandbox(level, limits=LIMITS, check=False) as sandbox:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = sandbox.run("import time\ntime.sleep(30)", [PRINTS], 5.0)
        finally:
            done.set()
            killer.join()
        assert (found.verdict, found.tests[0].detail) == ("infra", "the fork server died")
        assert sandbox.deaths == 3
        assert sandbox.run("print(42)", [PRINTS], 1.0).verdict == "pass"
