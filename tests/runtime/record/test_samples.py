import errno
import os
import random
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from rollpacker.config import RunConfig
from rollpacker.core.sample_table import REQUIRED, TEXTS, DamagedError, files, part, query, read
from rollpacker.core.types import AttemptId, EngineId, Group, PromptId, RoundKind
from rollpacker.engine.base import Output
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.record import samples as module
from rollpacker.runtime.record.samples import SampleLog
from rollpacker.runtime.step.step import StepRecord

TEXT = SimpleNamespace(
    begin=lambda: None,
    prompt=lambda _: "What is 1 + 1?",
    completion=lambda attempt: None if attempt.output is None else f"It is {attempt.id}.",
    answer=lambda _: "2",
)


def attempt(number, **other):
    output = Output(
        attempt=AttemptId(number),
        tokens=np.array([5, number], np.int32),
        logprobs=np.zeros(2, np.float32),
        finish_reason="stop",
        weights_version=0,
    )
    plain = {
        "id": AttemptId(number),
        "prompt": PromptId(f"prompt-{number // 4}"),
        "index": number % 4,
        "engine": EngineId(number % 2),
        "prompt_tokens": np.zeros(17, np.int32),
        "start_s": 0.5 * number,
        "since_s": None,
        "end_s": 0.5 * number + 3,
        "graded_s": 0.5 * number + 3.01,
        "output": output,
        "reward": 0.25,
        "rewards": {"math": 0.25},
        "verdict": "kept",
    }
    return Trajectory(**(plain | other))


def record(step, *attempts):
    made = attempts or [attempt(number) for number in range(4 * step, 4 * step + 4)]
    return StepRecord(
        step=step, start_s=0.0, end_s=99.0, kind=RoundKind.SHORT, attempts={a.id: a for a in made}
    )


def log(folder, said=None, resumed=-1, text=TEXT, rewards=("math",), **samples):
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rewards": [{"function": name} for name in rewards],
            "samples": samples,
        }
    )
    say = (said if said is not None else []).append
    return SampleLog(folder, config, last_step=resumed, texts=text, say=say)


def run(folder, first, last, said=None, resumed=-1, **samples):
    """Steps of four attempts each; nothing is closed, as after a crash."""
    made = log(folder, said, resumed, **samples)
    for step in range(first, last + 1):
        made.add(record(step), [])
    return made


def steps(folder):
    return read(folder)["step"].to_list()


def four(*numbers):
    return [number for number in numbers for _ in range(4)]


def test_rows_come_back(tmp_path):
    made = log(tmp_path, rewards=["math", "gsm8k"], token_ids=True)
    failed = attempt(99, output=None, reward=None, rewards={}, graded_s=None, verdict="failed")
    attempts = [*(attempt(number) for number in range(8)), failed]
    sample = SimpleNamespace(attempt=AttemptId(5))
    group = Group(prompt=PromptId("p"), samples=(sample,), advantages=np.array([-0.5], np.float32))
    made.add(record(1, *attempts), [group])
    frame = pl.read_parquet(part(tmp_path, 1))
    assert frame.columns[: len(REQUIRED)] == list(REQUIRED)
    assert all(frame.schema[name] == kind for name, kind in (REQUIRED | TEXTS).items())
    assert frame.height == 9
    assert frame.row(5, named=True) == {
        "prompt": "prompt-1",
        "attempt": 5,
        "sample_index": 1,
        "step": 1,
        "round_kind": "short",
        "worker": 1,
        "weights_version": 1,
        "prompt_tokens": 17,
        "tokens": 2,
        "reward": 0.25,
        "finish_reason": "stop",
        "state": "kept",
        "start_s": 2.5,
        "end_s": 5.5,
        "grade_s": pytest.approx(0.01),
        "truncated": False,
        "advantage": -0.5,
        "stale_tokens": 0,
        "rewards/math": 0.25,
        "rewards/gsm8k": None,
        "prompt_text": "What is 1 + 1?",
        "completion": "It is 5.",
        "answer": "2",
        "completion_ids": [5, 5],
    }
    last = frame.row(8, named=True)
    empty = ("finish_reason", "reward", "grade_s", "completion", "completion_ids", "truncated")
    assert [last[name] for name in (*empty, "rewards/math", "advantage")] == [None] * 8


def test_no_rows(tmp_path):
    log(tmp_path).add(StepRecord(step=0, start_s=0.0), [])
    assert read(tmp_path).height == 0
    assert dict(read(tmp_path).schema) == REQUIRED | TEXTS


@pytest.mark.parametrize(("first", "last"), [(4, 6), (0, 1), (6, 7)])
def test_on_resume_the_parts_of_later_steps_go(tmp_path, first, last):
    run(tmp_path, 0, 5)
    run(tmp_path, first, last, resumed=first - 1)
    assert steps(tmp_path) == four(*range(last + 1))


def test_what_is_kept_may_change_when_a_run_goes_on(tmp_path):
    run(tmp_path, 0, 1, texts=False)
    assert [*pl.read_parquet_schema(part(tmp_path, 0))] == [*REQUIRED, "rewards/math"]
    run(tmp_path, 2, 2, resumed=1, token_ids=True)
    later = log(tmp_path, resumed=2)
    later.add(record(3, attempt(12, extra={"note": "new"})), [])
    frame = read(tmp_path)
    assert frame["completion"].is_null().to_list() == [True] * 8 + [False] * 5
    assert frame["completion_ids"].is_null().sum() == 9
    assert frame["extra/note"].to_list() == [None] * 12 + ["new"]


def test_at_the_size_limit_the_oldest_parts_go(tmp_path):
    said = []
    run(tmp_path, 0, 9)
    limit = 3.5 * part(tmp_path, 0).stat().st_size
    run(tmp_path, 10, 13, said, resumed=9, max_gb=limit / 1e9)
    assert steps(tmp_path) == four(11, 12, 13)
    assert len(said) == 1
    assert "samples.max_gb" in said[0]
    run(tmp_path, 14, 14, resumed=13, max_gb=1e-9)
    assert steps(tmp_path) == four(14)


def test_prompts_are_stored_once(tmp_path):
    """A thousand responses to eight long prompts: their text costs little more than eight."""
    rng = random.Random(0)
    prompts = [rng.randbytes(2_000).hex() for _ in range(8)]
    texts = SimpleNamespace(**vars(TEXT) | {"prompt": lambda a: prompts[a.id % 8]})
    attempts = [attempt(number) for number in range(1_000)]
    log(tmp_path, text=texts).add(record(0, *attempts), [])
    assert part(tmp_path, 0).stat().st_size < 6 * sum(map(len, prompts))


def test_half_a_surrogate_pair_does_not_end_a_run(tmp_path):
    texts = SimpleNamespace(**vars(TEXT) | {"completion": lambda _: "\udc00 and \u20ac"})
    log(tmp_path, text=texts).add(record(0, attempt(0, prompt=PromptId("\ud83d"))), [])
    assert read(tmp_path).row(0, named=True)["completion"] == "? and \u20ac"


def damages(path, count, seed):
    """Cuts, turned bits and zeros at random places of a file."""
    data, rng = path.read_bytes(), random.Random(seed)
    for number in range(count):
        bad, at = bytearray(data), rng.randrange(len(data))
        if number % 3 == 0:
            del bad[at:]
        elif number % 3 == 1:
            bad[at] ^= 1 << rng.randrange(8)
        else:
            bad[at : at + 512] = bytes(len(bad[at : at + 512]))
        yield bytes(bad)


def test_no_damage_ends_a_run_that_goes_on(tmp_path):
    run(tmp_path, 0, 2)
    bad_part, seen = part(tmp_path, 1), 0
    for bad in damages(bad_part, 60, seed=1):
        bad_part.write_bytes(bad)
        run(tmp_path, 3, 3, resumed=2)
        said = []
        found = query(tmp_path, lambda table: table, said.append)["step"].to_list()
        assert len(said) <= 1
        if said:
            seen += 1
            assert "step-000001.parquet: not a whole parquet file" in said[0]
            assert "\n" not in said[0]
            assert found == four(0, 2, 3)
            with pytest.raises(DamagedError, match="step-000001"):
                read(tmp_path)
    assert seen > 30


def test_a_part_that_lacks_columns_is_damaged(tmp_path):
    run(tmp_path, 0, 1)
    pl.read_parquet(part(tmp_path, 0)).drop("step").write_parquet(part(tmp_path, 0))
    said = []
    assert query(tmp_path, lambda table: table, said.append)["step"].to_list() == four(1)
    assert "lacks the columns step" in said[0]


def test_a_full_disk_is_said_once_and_loses_nothing(tmp_path, monkeypatch):
    said, tried = [], []
    made = run(tmp_path, 0, 0, said)

    def full(path, data):
        tried.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(module, "replace_file", full)
        for step in (1, 2, 3):
            made.add(record(step), [])
    assert tried == [part(tmp_path, 1)] * 3, "a step tries one part, however many wait"
    assert len(said) == 1
    assert "No space left" in said[0]
    made.flush()
    assert steps(tmp_path) == four(0, 1, 2, 3)


def test_a_row_is_cheap(tmp_path, calls):
    made, step = log(tmp_path), record(0, *(attempt(number) for number in range(1000)))
    assert calls(lambda: made.add(step, [])) / 1000 < 40


def test_many_parts_are_read_as_one(tmp_path):
    run(tmp_path, 0, 120)
    assert [int(path.stem[-6:]) for path in files(tmp_path)] == [*range(121)]
    assert steps(tmp_path) == four(*range(121))
