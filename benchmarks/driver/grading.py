"""What grading costs: CPU time and bytes for each graded response, on real grading processes.

    python -m benchmarks.driver.grading
    python -m benchmarks.driver.grading --row-mb 5 --prompts 4 --group 16 --reward ids

Groups of responses are submitted one response at a time, as they finish in a run, and graded by
`math` or by a function that reads token ids only. CPU seconds are of the driver and of the grading
processes, after one group that warms up; bytes are those that the driver writes to them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._run import flags
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import GradingProcess

TICKS = os.sysconf("SC_CLK_TCK")


def ids_only(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(ids)) for ids in completion_ids]


class Pool(GradingPool):
    """Counts what is written, and knows its processes."""

    written = 0

    def _write(self, member: GradingProcess, frames: Sequence[bytes]) -> None:
        self.written += sum(map(len, frames))
        super()._write(member, frames)

    def numbers(self, field: int) -> int:
        """Of ``/proc/PID/stat``, from the third field on, summed."""
        stats = [Path(f"/proc/{p.popen.pid}/stat").read_text() for p in self._members]
        return sum(int(stat.rpartition(")")[2].split()[field]) for stat in stats)

    def cpu_s(self) -> float:
        """CPU seconds of the processes so far."""
        return (self.numbers(11) + self.numbers(12)) / TICKS

    def resident_mb(self) -> float:
        """Memory of a process now, on average."""
        return self.numbers(21) * os.sysconf("SC_PAGE_SIZE") / 1e6 / len(self._members)


def requests(args: argparse.Namespace, first: int, prompts: int) -> list[GradeRequest]:
    """Responses of some prompts, those of a group behind each other."""
    rows = [{"answer": "12", "tests": "x" * round(args.row_mb * 1e6)} for _ in range(prompts)]
    return [
        GradeRequest(
            attempt=AttemptId(first + number),
            prompt="What is it?",
            completion=f"So the answer is \\boxed{{{number % 20}}}.",
            completion_ids=[1] * 200,
            row=rows[number // args.group],
            source=f"{first}-{number // args.group}",
        )
        for number in range(prompts * args.group)
    ]


async def measure(args: argparse.Namespace) -> None:
    path = "math" if args.reward == "math" else f"{Path(__file__).resolve()}:ids_only"
    rewards = [RewardConfig(function=path, timeout_s=60)]
    pool = Pool(rewards, GradingConfig(workers=args.workers))
    pool.wait_ready()
    came: asyncio.Queue[Grade] = asyncio.Queue()

    def take(grades: list[Grade]) -> None:
        for grade in grades:
            came.put_nowait(grade)

    pool.attach(asyncio.get_running_loop(), take)

    async def graded(todo: Sequence[GradeRequest]) -> None:
        for request in todo:
            pool.submit([request])
            await asyncio.sleep(0)
        for _ in todo:
            assert (await came.get()).error is None

    await graded(requests(args, 0, 1))
    for number in range(1, args.rounds + 1):
        todo = requests(args, number * 10**6, args.prompts)
        pool.written, start = 0, time.perf_counter()
        before, theirs = time.process_time(), pool.cpu_s()
        await graded(todo)
        ours, theirs = time.process_time() - before, pool.cpu_s() - theirs
        each = 1e6 / len(todo)
        print(
            f"{len(todo)} responses, {time.perf_counter() - start:.2f} s: driver {each * ours:.0f} "
            f"and graders {each * theirs:.0f} us of CPU each, {pool.written / 1e6:.1f} MB written, "
            f"{pool.resident_mb():.0f} MB in a grading process"
        )
    pool.close()


def main() -> None:
    parser = flags(
        __doc__,
        row_mb=(0.0, "size of a row"),
        prompts=125,
        group=(8, "responses of a prompt"),
        workers=1,
        rounds=3,
        reward={"default": "math", "choices": ["math", "ids"]},
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
