"""Thousands of programs, honest and hostile, side by side."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollpacker.sandbox import CallTest, Level, Limits, Sandbox, StdinTest, Test
from rollpacker.sandbox.selftest import Targets, hostile_programs

PROGRAM = (
    "def f(a, b): return a * b\nif __name__ == '__main__': print(f(*map(int, input().split())))"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_honest_and_hostile_programs_do_not_mix(level: Level) -> None:
    draw = random.Random(0)
    limits = Limits(memory_mb=256, output_mb=2, idle_s=0.25)
    with (
        Targets() as world,
        Sandbox(level, zygotes=3, limits=limits, check=False) as sandbox,
        ThreadPoolExecutor(3) as threads,
    ):
        hostile = hostile_programs(world)

        def honest(number: int) -> str:
            a, b = draw.randrange(10**6), draw.randrange(10**6)
            right = number % 3 > 0
            answer = a * b + (not right)
            test: Test = StdinTest(stdin=f"{a} {b}\n", stdout=f"{answer}\n")
            if number % 2:
                test = CallTest(call="f", args=[a, b], expected=answer)
            found = sandbox.run(PROGRAM, [test], 2.0).verdict
            return "" if found == ("pass" if right else "fail") else f"honest: {found}"

        def attack(number: int) -> str:
            program = hostile[number % len(hostile)]
            found = sandbox.run(program.program, [program.test], 0.1)
            return "" if program.contained(found) else f"{program.name}: {found}"

        list(threads.map(honest, range(30)))
        descriptors = len(os.listdir("/proc/self/fd"))
        order = [honest] * 4000 + [attack] * 1000
        draw.shuffle(order)
        jobs = [threads.submit(job, number) for number, job in enumerate(order)]
        wrong = [message for job in jobs if (message := job.result())]
        assert wrong == []
        assert world.damage() == []
        assert len(os.listdir("/proc/self/fd")) == descriptors
