"""The driver alone, at the size of a cluster: what scheduling, grading's path and the logs cost.

    python -m benchmarks.driver.step
    python -m benchmarks.driver.step --attempts 2048 --modes exact --workers 16

One step with the real pump, policy, journal, grading processes, samples and metrics. The workers
are stand-ins in this process: they answer the real messages (pickled and read as in a pipe) with
responses of forced lengths (lognormal, about 2,000 tokens, at most 16,384) in simulated time, and
their own CPU is taken out. All figures are CPU seconds, so they hold on a machine that is busy with
other things; those of the grading processes and of the thread that writes samples are apart.
`longest` is the longest callback of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks._run import apart, flags, table
from benchmarks.driver import stand_ins
from benchmarks.driver.stand_ins import CAP, Simulated, StandIns, problems_of, tokenizer_and_corpus
from rollpacker.config import RunConfig, parse
from rollpacker.engine.base import SamplingParams
from rollpacker.job.plan.build import assemble, rollout_settings
from rollpacker.response_text import ResponseText
from rollpacker.runtime.attempts.rewards import Rewards
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.run_log import RunLog
from rollpacker.runtime.record.samples import Texts
from rollpacker.runtime.step.responses import Setup

GROUP = 16


class Meter:
    """CPU seconds of this thread without the stand-ins', in total and by callback."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count."""
        self.apart_s = self.longest_s = 0.0
        self._apart_since = time.thread_time()

    def __enter__(self) -> None:
        """What is done inside is not the driver's."""
        self._apart_since = time.thread_time()

    def __exit__(self, *_error: object) -> None:
        self.apart_s += time.thread_time() - self._apart_since

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run one callback of the event loop."""
        began, apart = time.thread_time(), self.apart_s
        try:
            return call(*args)
        finally:
            spent = time.thread_time() - began - (self.apart_s - apart)
            self.longest_s = max(self.longest_s, spent)


class TimedLoop(asyncio.SelectorEventLoop):
    """Knows how long each of its callbacks took."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._meter.timed, callback, *args, context=context)

    def call_at(self, when: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._meter.timed, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        super().add_reader(fd, self._meter.timed, callback, *args)


def config_of(folder: Path, mode: str, args: argparse.Namespace, attempts: int) -> RunConfig:
    raced = 1.25**2 if mode == "race" else 1.0
    return parse(
        {
            "output": str(folder),
            "steps": 1,
            "model": {"path": "stand-in"},
            "data": {"path": "stand-in"},
            "rewards": [{"function": f"{stand_ins.__file__}:score"}],
            "devices": {"per_node": args.workers, "kind": "cpu"},
            "grading": {"workers": args.graders},
            "rollout": {
                "prompts_per_step": round(attempts / GROUP / raced),
                "num_generations": GROUP,
                "max_completion_length": CAP,
                "tail_batching": {"mode": mode},
            },
        },
        source="benchmark",
    )


async def run_step(meter: Meter, config: RunConfig, folder: Path, out: dict[str, Any]) -> None:
    """Build the run, make one step and fill ``out``."""
    tokenizer, corpus = tokenizer_and_corpus()
    read = ResponseText.of(tokenizer, ())
    problems = problems_of(2 * config.rollout.prompts_per_step, corpus)
    clock = Simulated()
    pool = StandIns(config, meter, clock, corpus)
    rewards = Rewards(
        config.rewards, config.grading, read, rows=problems.rows.values(), max_steps=1
    )
    rewards.start(asyncio.get_running_loop())
    progress = Progress(Console(file=open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    log = RunLog(
        folder,
        config,
        last_step=-1,
        max_length=CAP,
        progress=progress,
        texts=Texts(tokenizer, read, problems.rows),
        trackers=(),
    )
    setup = Setup(
        workers=pool,
        problems=problems,
        rewards=rewards,
        params=SamplingParams(max_tokens=CAP),
        seed=config.seed,
        clock=clock,
        lockstep=False,
    )
    settings = rollout_settings(config, problems, pool, CAP)
    parts = assemble(config, setup, settings, pool, log, rewards, None)
    asyncio.get_running_loop().call_soon(pool.serve, rewards)
    log.journal.meta(parts.policy.journal_head())
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1000)
    await asyncio.sleep(0)
    meter.reset()
    began, whole, wall = time.thread_time(), time.process_time(), time.monotonic()
    loading_s = children_s()
    asyncio.get_running_loop().call_soon(gc.collect)
    record = await parts.driver.step(0)
    await log.step(
        record,
        parts.updates.groups,
        policy=parts.policy,
        num_tokens=0,
        epoch=0.0,
        extra={},
    )
    log.flush()
    spent = time.thread_time() - began
    out["driver_s"], out["writer_s"] = spent - meter.apart_s, time.process_time() - whole - spent
    await asyncio.sleep(0)
    out["longest_ms"] = 1e3 * meter.longest_s
    out["wall_s"], out["grading_s"] = time.monotonic() - wall, children_s() - loading_s
    out["attempts"], out["responses"] = len(record.attempts), pool.responses
    out["tokens"], out["sent_mb"] = pool.tokens, pool.sent / 1e6
    parts.close()


def children_s() -> float:
    """CPU seconds of the grading processes so far."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode and size in this process; the grading processes are its only children."""
    meter, out = Meter(), {"mode": args.modes[0]}
    with (
        tempfile.TemporaryDirectory() as name,
        asyncio.Runner(loop_factory=lambda: TimedLoop(meter)) as runner,
    ):
        config = config_of(Path(name), args.modes[0], args, args.attempts[0])
        runner.run(run_step(meter, config, Path(name), out))
    return out


def show(rows: Sequence[dict[str, Any]]) -> None:
    head = ["mode", "attempts", "driver s", "us a response", "ratio", "longest ms"]
    head += ["grading s", "writer s"]
    cells: list[list[str]] = []
    before: dict[str, Any] = {}
    for row in rows:
        ratio = row["driver_s"] / before["driver_s"] if before.get("mode") == row["mode"] else None
        each = 1e6 / row["responses"]
        cells.append(
            [
                row["mode"],
                f"{row['attempts']:,}",
                f"{row['driver_s']:.2f}",
                f"{row['driver_s'] * each:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{row['longest_ms']:.0f}",
                f"{row['grading_s']:.1f}",
                f"{row['writer_s']:.1f}",
            ]
        )
        before = row
    table(head, cells)


def main() -> None:
    args = flags(
        __doc__,
        attempts=[8192, 16384],
        modes=["off", "exact", "race"],
        workers=64,
        graders=2,
        json=(False, "one measurement as JSON"),
    ).parse_args()
    if args.json:
        print(json.dumps(measure(args)))
        return
    same = ("--json", "--workers", str(args.workers), "--graders", str(args.graders))
    show(
        [
            apart("benchmarks.driver.step", *same, "--modes", mode, "--attempts", str(attempts))
            for mode, attempts in itertools.product(args.modes, args.attempts)
        ]
    )


if __name__ == "__main__":
    main()
