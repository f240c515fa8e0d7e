import asyncio
from collections.abc import Callable, Sequence

import psutil

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool

CODE = """
import os, signal, time

def act(completions, **columns):
    text = completions[0]
    if text == "raise":
        raise KeyError("no\\nsuch key")
    if text == "hang":
        time.sleep(1000)
    if text == "spin":
        while True:
            pass
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        raise SystemExit(3)
    if text == "crash":
        os._exit(7)
    if text == "text":
        return ["much"]
    if text == "many":
        return [1.0, 1.0]
    if text == "forge":
        for number in range(3, 200):
            try:
                os.write(number, b'\\x02\\x00\\x00\\x00{}' * 8)
            except OSError:
                pass
    if text == "flood":
        for number in range(3, 200):
            try:
                os.write(number, b'\\xff' * 4096)
            except OSError:
                pass
    if text == "once" and not os.path.exists(columns["marker"][0]):
        open(columns["marker"][0], "w").close()
        os._exit(1)
    if text.startswith("sleep "):
        time.sleep(float(text[6:]))
        return [1.0]
    if text == "none":
        return [None]
    return [float(text)]

def length(completions, **_):
    return [float(len(c)) for c in completions]

def never(completions, **_):
    return [None] * len(completions)

def rank(completions, **_):
    order = sorted(float(c) for c in completions)
    return [order.index(float(c)) / len(completions) for c in completions]

def pid(completions, **_):
    return [float(os.getpid()) for _ in completions]
"""
"""Rewards of all kinds of character."""


def requests(texts: Sequence[str], first: int = 0, **row) -> list[GradeRequest]:
    return [
        GradeRequest(
            attempt=AttemptId(first + i),
            prompt="p",
            completion=text,
            completion_ids=[1],
            row={"answer": "1"} | row,
            source=f"row {first + i}",
        )
        for i, text in enumerate(texts)
    ]


async def collect(pool: GradingPool, feed: Callable[[], None], count: int) -> list[Grade]:
    """Attach to this loop, feed, and wait for ``count`` grades."""
    grades: list[Grade] = []
    enough = asyncio.Event()

    def on_grades(some: list[Grade]) -> None:
        grades.extend(some)
        if len(grades) >= count:
            enough.set()

    pool.attach(asyncio.get_running_loop(), on_grades)
    feed()
    await asyncio.wait_for(enough.wait(), 60)
    return grades


def processes_of(pool: GradingPool) -> list[int]:
    """Oldest first."""
    return [process.popen.pid for process in pool._members]


def grading_processes() -> list[int]:
    """Of all pools of this process, oldest first; it may have other children."""
    found = psutil.Process().children(recursive=True)
    named = [child for child in found if name(child) == "reward.worker"]
    return [child.pid for child in sorted(named, key=lambda child: child.pid)]


def name(process: psutil.Process) -> str:
    """Of a process; empty when it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
