"""How reward functions are called: threads, coroutines, determinism, and what they slow down."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_jobs as jobs

from rollpacker.config import MiniEngineConfig
from rollpacker.trl import GRPOTrainer

pytestmark = pytest.mark.trl


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rollpacker" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_threads_call_at_the_same_time(tmp_path: Path) -> None:
    meeting, calls = threading.Barrier(2, timeout=30), []

    def meets(completions: list[str], **_: Any) -> list[float]:
        calls.append(threading.current_thread().name)
        if len(calls) <= 2:
            meeting.wait()
        return jobs.ones(completions)

    ours = jobs.trainer(GRPOTrainer, tmp_path, rewards=meets, reward_threads=2, num_train_epochs=1)
    ours.train()
    assert len(set(calls)) == 2


def test_one_thread_calls_one_after_the_other(tmp_path: Path) -> None:
    busy, most = [], []

    def alone(completions: list[str], **_: Any) -> list[float]:
        busy.append(1)
        most.append(len(busy))
        busy.pop()
        return jobs.ones(completions)

    jobs.trainer(GRPOTrainer, tmp_path, rewards=(alone, jobs.short), num_train_epochs=1).train()
    assert set(most) == {1}


def test_a_round_waits_for_what_is_slow_and_no_longer(tmp_path: Path) -> None:
    """A response is told as soon as it has ended, while others decode."""
    first: list[int] = []

    async def slow(completions: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
        first.append(len(completions))
        await asyncio.sleep(0.01)
        return [float(len(ids)) for ids in completion_ids]

    ours = jobs.trainer(GRPOTrainer, tmp_path, rewards=slow, num_train_epochs=1)
    ours.train()
    assert sum(first) == 6 * 8
    assert len(first) > 12, "whole rounds at a time"


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_full_determinism_does_not_depend_on_how_long_rewards_take(
    tmp_path: Path, mode: str
) -> None:
    clock = random.Random()

    async def whenever(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(clock.random() * 0.02)
        return jobs.ones(completions)

    found = []
    for name in ("one", "other"):
        ours = jobs.trainer(
            GRPOTrainer,
            tmp_path / name,
            rewards=whenever,
            tail_batching=mode,
            full_determinism=True,
            num_train_epochs=1,
        )
        ours.train()
        found.append(jobs.weights(ours))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_engine_has_the_options_that_it_was_given(tmp_path: Path) -> None:
    small = MiniEngineConfig(max_running=2)
    options = {"num_train_epochs": 1, "learning_rate": 0.0}
    jobs.trainer(GRPOTrainer, tmp_path / "small", engine=small, **options).train()
    jobs.trainer(GRPOTrainer, tmp_path / "usual", **options).train()
    narrow, usual = (metrics(tmp_path / name) for name in ("small", "usual"))
    assert [m["completions/mean_length"] for m in narrow] == [
        m["completions/mean_length"] for m in usual
    ]
    assert sum(m["engine/steps"] for m in narrow) > 1.5 * sum(m["engine/steps"] for m in usual)
