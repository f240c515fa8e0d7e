"""The driver alone, in virtual time: what it estimates, and that order does not matter to it."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollpacker.config.rollout import TailBatchingConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import read, replay
from rollpacker.core.types import AttemptId, Prompt, PromptId
from rollpacker.policy.rollout import from_journal
from rollpacker.verl.round_driver import (
    AttemptStopped,
    Broken,
    InOrder,
    Report,
    ResponseFinished,
    RoundDriver,
    RoundError,
    Speed,
    Stored,
)
from rollpacker.verl.settings import VerlConfig, rollout_settings

pytestmark = pytest.mark.verl

P0, R0, CAP, STEPS, POOLED = 32, 8, 400, 45, 20
FIRST_S, TOKEN_S, HOP_S = 0.3, 0.01, 0.02


class Workers:
    """Workers, servers and rewards of an agenda of reports."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lengths: list[int] = []
        self._agenda: list[tuple[float, int, Report]] = []
        self._order = itertools.count()
        self._running: dict[AttemptId, tuple[float, int]] = {}
        self._random = random.Random(7)

    def send(self, _worker: int, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            match decision:
                case do.StartAttempt():
                    self._start(decision.attempt)
                case do.AbortAttempt():
                    self._abort(decision.attempt)
                case do.GradeAttempt():
                    self._later(HOP_S, ev.AttemptGraded(attempt=decision.attempt, reward=1.0))
                case do.AcceptGroup():
                    self._later(HOP_S, Stored(prompt=decision.prompt))

    def _start(self, attempt: AttemptId) -> None:
        length = round(min(CAP, max(1, 30 * math.exp(0.9 * self._random.gauss(0, 1)))))
        seconds = FIRST_S + TOKEN_S * length
        self.lengths.append(length)
        self._running[attempt] = self.now, length
        done = ResponseFinished(
            attempt=attempt,
            tokens=length,
            finish_reason="length" if length == CAP else "stop",
            seconds=seconds,
        )
        self._later(seconds, done)

    def _abort(self, attempt: AttemptId) -> None:
        began, length = self._running.pop(attempt)
        seconds = self.now - began
        known = length if seconds >= FIRST_S + TOKEN_S * length else None
        self._later(HOP_S, AttemptStopped(attempt=attempt, tokens=known, seconds=seconds))

    def _later(self, seconds: float, report: Report) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), report))

    def run(self, take: Callable[[Sequence[Report]], None]) -> None:
        while self._agenda:
            self.now, _, report = heapq.heappop(self._agenda)
            if not isinstance(report, ResponseFinished) or report.attempt in self._running:
                take([report])


def verl_config() -> Any:
    rollout = SimpleNamespace(n=R0, response_length=CAP, temperature=1.0, top_p=1.0, top_k=-1)
    data = type("Data", (dict,), {"train_batch_size": P0})(seed=1)
    return SimpleNamespace(data=data, actor_rollout_ref=SimpleNamespace(rollout=rollout))


def made(folder: Path, workers: Workers, mode: str) -> RoundDriver:
    ours = VerlConfig(tail_batching=TailBatchingConfig(mode=mode, audit_every=0))
    settings = rollout_settings(ours, verl_config(), 10_000)
    return RoundDriver(settings, folder, None, workers.send)


def step(driver: RoundDriver, workers: Workers, number: int, fresh: itertools.count) -> None:
    count = driver.start(number, 10_000)
    prompts = [Prompt(id=PromptId(f"p{next(fresh)}")) for _ in range(count)]
    driver.place(dict.fromkeys(driver.drawn(prompts), 0))
    workers.run(driver.take)
    assert driver.done
    driver.trained(1.0)
    driver.published(number + 1)


def test_the_bias_meter_agrees_with_responses_that_were_never_aborted(tmp_path: Path) -> None:
    workers, fresh = Workers(), itertools.count()
    driver = made(tmp_path, workers, "race")
    started: list[int] = []
    for number in range(1, STEPS + 1):
        started.append(len(workers.lengths))
        step(driver, workers, number, fresh)
    kept = [line["event"]["tokens"] for line in kept_ends(tmp_path, first=STEPS - POOLED + 1)]
    true = np.mean(workers.lengths)
    assert len(kept) == POOLED * P0 * R0
    assert np.mean(kept) < 0.9 * true, "nothing to meter"
    metered = driver.metrics()["tail/kept_vs_true_len"]
    assert metered == pytest.approx(np.mean(kept) / true, rel=0.05)
    assert driver.metrics()["tail/aborted_tokens_estimated"] >= 0.0
    driver.close()
    assert replay(tmp_path / "journal.jsonl", from_journal).differences == []


def kept_ends(folder: Path, first: int) -> list[dict[str, Any]]:
    """Lines of a journal with the ends of the responses that were kept, from a step on."""
    ends: dict[int, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    now = 0
    for _, line in read(folder / "journal.jsonl"):
        event = line.get("event", {})
        now = event.get("step", now) if event.get("kind") == "StepStarted" else now
        if event.get("kind") == "AttemptFinished":
            ends[event["attempt"]] = line
        for decision in line.get("decisions", ()):
            if decision["kind"] == "AcceptGroup" and now >= first:
                found += [ends[attempt] for attempt in decision["attempts"]]
    return found


def test_what_nobody_counted_is_marked(tmp_path: Path) -> None:
    workers = Workers()
    driver = made(tmp_path, workers, "race")
    step(driver, workers, 1, itertools.count())
    driver.close()
    events = [line.get("event", {}) for _, line in read(tmp_path / "journal.jsonl")]
    aborted = [event for event in events if event.get("kind") == "AttemptAborted"]
    estimated = [event for event in aborted if event.get("estimated")]
    assert estimated
    assert sum(event["tokens"] for event in estimated) == driver.round.estimated
    # Besides those that were told to stop: the responses that had finished of prompts that lost.
    assert sum(event["tokens"] for event in aborted) <= driver.round.aborted
    assert driver.round.aborted == driver.metrics()["tail/aborted_tokens"]


def test_tokens_of_a_time_are_those_of_a_line_through_the_last_responses() -> None:
    speed = Speed()
    assert speed.tokens(3.0) == 0
    for tokens in (10, 20, 50, 200):
        speed.add(tokens, FIRST_S + TOKEN_S * tokens)
    assert speed.tokens(FIRST_S + TOKEN_S * 120) == 120
    assert speed.tokens(0.1 * FIRST_S) == 0
    alike = Speed()
    alike.add(10, 1.0)
    assert alike.tokens(3.0) == 30


def test_a_worker_that_cannot_go_on_ends_the_round(tmp_path: Path) -> None:
    workers = Workers()
    driver = made(tmp_path, workers, "exact")
    prompts = [Prompt(id=PromptId(f"p{n}")) for n in range(driver.start(1, 10_000))]
    driver.place(dict.fromkeys(driver.drawn(prompts), 0))
    with pytest.raises(RoundError, match="the queue is full"):
        driver.take([Broken(error="the queue is full")])


def test_batches_that_overtake_each_other_are_put_in_order() -> None:
    inbox: InOrder[str] = InOrder()
    assert list(inbox.take(1, "b")) == []
    assert list(inbox.take(0, "a")) == ["a", "b"]
    assert list(inbox.take(2, "c")) == ["c"]
