"""What a run writes at the end of a step, and the thread that writes its samples."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollpacker.config import RunConfig
from rollpacker.core.sample_table import read
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.policy.lengths import Bias
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.run_log import RunLog
from rollpacker.runtime.step.step import StepRecord


class Step:
    """Logs steps of one attempt whose texts come from ``texts``."""

    def __init__(self, folder: Path, **texts: Any) -> None:
        config = RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
        )
        made: Any = SimpleNamespace(
            **dict.fromkeys(("prompt", "completion", "answer"), lambda _: "2")
            | {"begin": lambda: None}
            | texts
        )
        self.log = RunLog(
            folder,
            config,
            last_step=-1,
            max_length=9,
            progress=Progress(),
            texts=made,
            trackers=(),
        )

    def end(self, step: int) -> None:
        record = StepRecord(step=step, start_s=0.0, end_s=1.0)
        prompt = PromptId("p")
        record.attempts[AttemptId(step)] = Trajectory(
            id=AttemptId(step),
            prompt=prompt,
            index=0,
            engine=EngineId(0),
            prompt_tokens=np.zeros(2, np.int32),
            start_s=0.0,
            since_s=0.0,
        )
        policy: Any = SimpleNamespace(bias=Bias, queue=0)
        written = self.log.step(record, [], policy=policy, num_tokens=0, epoch=0.0, extra={})
        asyncio.run(written)


def test_after_a_flush_the_rows_of_every_step_are_on_disk(tmp_path: Path) -> None:
    run = Step(tmp_path)
    for step in range(3):
        run.end(step)
    run.log.flush()
    assert read(tmp_path).select("attempt", "completion").rows() == [(n, "2") for n in range(3)]
    run.log.close()


def test_what_is_wrong_with_the_rows_of_a_step_ends_the_next_one(tmp_path: Path) -> None:
    def broken(_attempt: Trajectory) -> str:
        raise RuntimeError("no such token")

    run = Step(tmp_path, completion=broken)
    run.end(0)
    with pytest.raises(RuntimeError, match="no such token"):
        run.end(1)
    with pytest.raises(RuntimeError, match="no such token"):
        run.log.close()
    assert read(tmp_path).height == 0
