"""Whatever a grading process writes: its own responses pay for it, and the others are graded."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from pool_helpers import requests

from fuzzing import Child, amiss, kill, torn
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.processes.frames import Channel
from rollpacker.reward.base import Grade
from rollpacker.reward.processes import pool as pool_module
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import GradingProcess

LOUD = 0
"""The response whose process writes anything."""


class Process(Child):
    """That grades, and is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.of = GradingProcess(self, Channel(self.ours), time.monotonic())  # type: ignore[arg-type]
        self.write(json.dumps({"ready": True}).encode())


class Pool:
    """Two such processes, and two responses, of which one goes on being asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[Process] = []
        monkeypatch.setattr(pool_module, "start", self._start)
        monkeypatch.setattr("rollpacker.processes.supervised._LONGEST_PAUSE_S", 0.0)
        monkeypatch.setattr(GradingProcess, "kill", kill)
        reward = RewardConfig(function="rollpacker.reward.math:score", timeout_s=600.0)
        self.pool = GradingPool([reward], GradingConfig(workers=2, retries=0))
        self.grades: list[Grade] = []
        self.pool._on_grades = self.grades.extend

    def _start(self, *_: Any) -> GradingProcess:
        self.processes.append(Process())
        return self.processes[-1].of

    def submit(self, attempt: int) -> None:
        self.pool.submit(requests([str(attempt)], first=attempt))
        self.pump()

    def of(self, attempt: int) -> Process | None:
        for process in self.processes:
            jobs = process.of.jobs
            if process.alive and jobs and jobs[0].requests[0].attempt == attempt:
                return process
        return None

    def pump(self) -> Sequence[Grade]:
        before = len(self.grades)
        for _ in range(3):
            self.pool._check()
            self.pool._go_on()
        self.processes = [each for each in self.processes if each.alive]
        return self.grades[before:]


def reply(rng: random.Random, job: int) -> dict[str, Any]:
    """As an honest process writes them."""
    kinds: list[dict[str, Any]] = [
        {
            "job": job,
            "f": 0,
            "scores": [0.5],
            "s": 0.01,
            "extra": [{"a": "b"}],
            "metrics": [{"m": 1.0}],
        },
        {"job": job, "f": 0, "error": "KeyError: 'x'", "way": "KeyError", "s": 0.01},
        {"beat": job},
        {"say": "a warning"},
        {"ready": True},
        {"fatal": "cannot be loaded"},
    ]
    return rng.choice((kinds[0], kinds[0], *kinds))


def written(rng: random.Random, job: int) -> bytes:
    told = reply(rng, rng.choice((job, job, job, job + 1, -1)))
    told = amiss(told, rng) if rng.random() < 0.5 else told
    try:
        text = json.dumps(told, default=lambda each: each.decode("latin-1"))
    except RecursionError:
        text = "[" * 5000
    data = text.encode("utf-8", "surrogatepass")
    return torn(data, rng) if rng.random() < 0.2 else data


@pytest.mark.parametrize("seed", [34, pytest.param(35, marks=pytest.mark.wide)])
def test_frames_of_any_kind(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    pool = Pool(monkeypatch)
    pool.pump()
    quiet, loud = 1, 1000
    pool.submit(quiet)
    pool.submit(loud)
    bystander = pool.of(quiet)
    assert bystander is not None
    count = 0
    while count < 5200:
        process = pool.of(loud)
        if process is None:
            loud += 1
            pool.submit(loud)
            continue
        assert process is not bystander
        job = process.of.jobs[0].id
        honest = json.dumps({"job": job, "f": 0, "scores": [0.5], "s": 0.01}).encode()
        # Or all responses would fail, which ends a run by rule.
        process.write(honest if loud % 2 else written(rng, job))
        count += 1
        for grade in pool.pump():
            assert grade.attempt == loud, f"seed {seed}"
            seen["graded" if grade.error is None else grade.error.split("(")[0]] += 1
        assert bystander.alive
        assert pool.pool.broken is None
    (held,) = bystander.of.jobs
    bystander.write(json.dumps({"job": held.id, "f": 0, "scores": [1.0], "s": 0.1}).encode())
    graded = [grade for grade in pool.pump() if grade.attempt == quiet]
    assert [grade.reward for grade in graded] == [1.0]
    print(f"\nseed {seed}: {count} frames of a grading process: {dict(seen)}")
    assert min(seen.values()) >= 1
    assert seen["graded"] > 10
    assert sum(number for said, number in seen.items() if "nonsense" in said) > 10


def test_a_length_beyond_all_bounds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch)
    pool.pump()
    pool.submit(5)
    process = pool.of(5)
    assert process is not None
    process.end.sendall(struct.pack("<I", 2**32 - 1))
    (grade,) = pool.pump()
    assert grade.error is not None
    assert "wrote more than 1 MiB at once" in grade.error
