"""Records of steps made by hand: the bubble and the workers' file where engines and replicas share
devices, and where each have their own."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollpacker.config import RunConfig
from rollpacker.core.types import AttemptId, Drafted, EngineId, PromptId, ReplicaId, RoundKind
from rollpacker.engine.base import Output
from rollpacker.policy.engines.fleet import Fleet, by_number, colocated, grid, separate
from rollpacker.policy.lengths import Bias, BiasMeter, LengthHistory
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.record.metrics import Counters
from rollpacker.runtime.record.progress import Progress, pending
from rollpacker.runtime.record.run_log import RunLog
from rollpacker.runtime.step.step import Formation, ReplicaTask, StepRecord

DECODED = {0: 6.0, 1: 4.0}
"""When each engine's attempts end; the rollout is over with the last of them, the step at 10."""


def record(fleet: Fleet, *tasks: tuple[int, float, float]) -> StepRecord:
    step = StepRecord(step=0, start_s=0.0, rollout_end_s=6.0, end_s=10.0, fleet=fleet)
    for engine, end in DECODED.items():
        step.attempts[AttemptId(engine)] = Trajectory(
            id=AttemptId(engine),
            prompt=PromptId("p"),
            index=engine,
            engine=EngineId(engine),
            prompt_tokens=np.zeros(2, np.int32),
            start_s=0.0,
            since_s=0.0,
            end_s=end,
        )
    step.tasks = [
        ReplicaTask(
            step=0,
            replica=ReplicaId(replica),
            kind="accumulate",
            prompts=(PromptId("p"),),
            start_s=start,
            end_s=end,
        )
        for replica, start, end in tasks
    ]
    return step


def lines(step: StepRecord, folder: Path) -> list[dict[str, Any]]:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    )
    texts: Any = SimpleNamespace(
        begin=lambda: None, **dict.fromkeys(("prompt", "completion", "answer"), lambda _: "2")
    )
    log = RunLog(
        folder, config, last_step=-1, max_length=9, progress=Progress(), texts=texts, trackers=()
    )
    policy: Any = SimpleNamespace(bias=Bias, queue=0)
    written = log.step(step, [], policy=policy, num_tokens=0, epoch=0.0, extra={})
    asyncio.run(written)
    log.flush()
    log.close()
    return [json.loads(line) for line in (folder / "workers.jsonl").read_text().splitlines()]


def test_colocated_gradients_fill_the_engines_gaps(tmp_path: Path) -> None:
    fleet = by_number("colocated", (0, 1), (0, 1))
    step = record(fleet, (1, 4.0, 9.0), (0, 7.0, 10.0))
    assert step.bubble() == pytest.approx({"rollout": 0.0, "train": 2 / 8, "total": 2 / 20})
    assert lines(step, tmp_path) == [
        {"step": 0, "worker": 1, "prompts": 1, "start_s": 4.0, "end_s": 9.0, "kind": "accumulate"},
        {"step": 0, "worker": 0, "prompts": 1, "start_s": 7.0, "end_s": 10.0, "kind": "accumulate"},
    ]


def test_a_colocated_replica_of_two_engines_is_written_for_both(tmp_path: Path) -> None:
    step = record(by_number("colocated", (0, 1), (0,)), (0, 6.0, 10.0))
    assert step.bubble() == pytest.approx({"rollout": 2 / 12, "train": 0.0, "total": 2 / 20})
    assert [line["worker"] for line in lines(step, tmp_path)] == [0, 1]
    assert "role" not in lines(step, tmp_path)[0]


def test_a_bubble_of_colocated_engines_does_not_depend_on_their_devices() -> None:
    small = by_number("colocated", (0, 1), (0,))
    large = colocated(grid(8, 8), tensor_parallel=4, replica=8)
    tasks = (0, 6.0, 9.0)
    assert record(large, tasks).bubble() == pytest.approx(record(small, tasks).bubble())


def test_a_replica_whose_engine_is_gone_has_a_device_still(tmp_path: Path) -> None:
    step = record(by_number("colocated", (0, 1), (0, 2), 1), (2, 0.0, 5.0))
    assert step.bubble()["total"] == pytest.approx((4.0 + 6.0 + 5.0) / 30)
    assert [line["worker"] for line in lines(step, tmp_path)] == [2]


def test_separate_replicas_have_a_bubble_of_their_own(tmp_path: Path) -> None:
    """Engine 0 and replica 0 have one number and nothing else in common."""
    step = record(by_number("separate", (0, 1), (0,)), (0, 4.0, 9.0))
    assert step.bubble() == pytest.approx(
        {"rollout": (2 + 4) / 18, "train": (4 + 4 + 1) / 12, "total": (4 + 6 + 5) / 30}
    )
    (line,) = lines(step, tmp_path)
    assert (line["worker"], line["role"]) == (0, "replica")
    assert (line["devices"], line["engine_devices"]) == (1, 1)


def test_what_has_more_devices_counts_more(tmp_path: Path) -> None:
    devices = grid(5, 8)
    step = record(separate(devices[:4], devices[4:], tensor_parallel=2, replica=1), (0, 4.0, 9.0))
    assert step.bubble()["total"] == pytest.approx((2 * 4 + 2 * 6 + 5) / 50)
    (line,) = lines(step, tmp_path)
    assert (line["devices"], line["engine_devices"]) == (1, 2)


def test_who_took_no_part_has_no_bubble_but_who_stood_idle_has() -> None:
    step = record(by_number("colocated", (0, 1, 2), (0, 1, 2)))
    assert step.bubble()["total"] == pytest.approx((4 + 6) / 20)
    nothing = msg.Work(
        decode_steps=0,
        generated_tokens=0,
        prefill_tokens=0,
        preemptions=0,
        cpu_s=0.0,
        decode_cpu_s=0.0,
    )
    step.work = {EngineId(n): nothing for n in range(3)}
    assert step.bubble()["total"] == pytest.approx((4 + 6 + 10) / 30)


def test_a_formed_engine_keeps_all_its_devices_busy() -> None:
    """From when they were put together on; before, each counts for its own."""
    step = record(by_number("colocated", (0, 1), (0,)))
    alone = step.bubble()["rollout"]
    assert alone == pytest.approx(2 / 12)
    both = (EngineId(0), EngineId(1))
    step.formed = [Formation(engine=EngineId(0), members=both, at_s=5.0)]
    assert step.bubble()["rollout"] == pytest.approx(1 / 12)
    step.formed = [Formation(engine=EngineId(1), members=both, at_s=0.0)]
    assert step.bubble()["rollout"] == pytest.approx(2 / 12)


def test_devices_that_are_put_together_twice_count_once() -> None:
    four = tuple(map(EngineId, range(4)))
    step = record(by_number("colocated", (0, 1, 2, 3), (0, 1, 2, 3)))
    step.formed = [
        Formation(engine=EngineId(0), members=four[:2], at_s=0.0),
        Formation(engine=EngineId(0), members=four, at_s=5.0),
    ]
    # Engines 0 and 1 decode all the time, 2 and 3 from 5 on.
    assert step.bubble()["rollout"] == pytest.approx(10 / 24)


def test_what_decoding_ahead_brought() -> None:
    """Of all engines that an attempt was on; the last to end is told apart."""

    def output(attempt: int, drafts: Drafted) -> Output:
        return Output(
            attempt=AttemptId(attempt),
            tokens=np.zeros(9, np.int32),
            logprobs=np.zeros(9, np.float32),
            finish_reason="stop",
            weights_version=0,
            drafts=drafts,
        )

    step = record(by_number("colocated", (0, 1), (0, 1)))
    assert step.drafts()["tokens_per_verification"] == 1.0
    last, other = step.attempts[AttemptId(0)], step.attempts[AttemptId(1)]
    last.output = output(0, Drafted(2, 8, 4))
    other.move(EngineId(0), 1.0, output(1, Drafted(1, 4, 0)))
    other.output = output(1, Drafted(3, 9, 5))
    assert step.drafts() == {
        "drafted": 21,
        "accepted": 9,
        "tokens_per_verification": 1 + 9 / 6,
        "last_tokens_per_verification": 3.0,
        "last_verifications": 2,
    }


def test_what_only_empty_responses_tell_is_counted() -> None:
    """Those that raced and lost had begun."""
    history = LengthHistory()
    for n in range(10):
        history.observe(PromptId("p"), 5 * (n == 0), n == 0, RoundKind.SHORT, 0)
    bias = BiasMeter("race", history).measure([0, 0])
    assert bias.censored
    step = record(by_number("colocated", (0, 1), (0, 1)))
    step.kept = [*step.attempts.values()]
    counters = Counters()
    counters.add(step, [], bias.kept_vs_true_len, learns=True)
    assert counters.summary()["tail"]["kept_vs_true_len"] == 1.0


def test_a_late_step_names_its_oldest_open_attempt() -> None:
    step = record(by_number("colocated", (EngineId(0), EngineId(1)), ()))
    assert pending(step) == "the response of attempt 0 (prompt p, worker 0) and 1 more"
