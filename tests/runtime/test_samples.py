import errno
import os
import time

import polars as pl
import pytest

from rollpacker.core.types import AttemptId, PromptId, RoundKind, WorkerId
from rollpacker.runtime import samples as module
from rollpacker.runtime.samples import SCHEMA, SampleLog, merge, read


def add(log, attempt, step, **other):
    row = {
        "prompt": PromptId(f"prompt-{attempt // 4}"),
        "attempt": AttemptId(attempt),
        "sample_index": attempt % 4,
        "step": step,
        "round_kind": RoundKind.SHORT,
        "worker": WorkerId(attempt % 2),
        "weights_version": step,
        "prompt_tokens": 17,
        "tokens": 100 + attempt,
        "finish_reason": "stop",
        "state": "kept",
        "start_s": 0.5 * attempt,
        "end_s": 0.5 * attempt + 3,
        "reward": 0.25,
        "grade_s": 0.01,
    }
    log.add(**(row | other))


def run(folder, first, last, said=None, resumed=-1):
    """Steps of four attempts each, flushed after each step; not closed, as after a crash."""
    log = SampleLog(folder, last_step=resumed, say=(said if said is not None else []).append)
    for step in range(first, last + 1):
        for attempt in range(4 * step, 4 * step + 4):
            add(log, attempt, step)
        log.flush()
    return log


def steps(folder):
    return read(folder)["step"].to_list()


def test_rows_come_back(tmp_path):
    log = run(tmp_path, 0, 1)
    add(log, 99, 1, finish_reason=None, state="failed", reward=None, grade_s=None)
    log.close()
    frame = pl.read_parquet(tmp_path / "samples.parquet")
    assert dict(frame.schema) == SCHEMA
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
        "tokens": 105,
        "reward": 0.25,
        "finish_reason": "stop",
        "state": "kept",
        "start_s": 2.5,
        "end_s": 5.5,
        "grade_s": pytest.approx(0.01),
    }
    last = frame.row(8, named=True)
    assert (last["reward"], last["finish_reason"], last["grade_s"]) == (None, None, None)
    assert not (tmp_path / "samples").exists()


def test_no_rows(tmp_path):
    SampleLog(tmp_path, say=[].append).close()
    assert read(tmp_path).height == 0
    assert dict(read(tmp_path).schema) == SCHEMA


def test_resume_drops_later_steps(tmp_path):
    run(tmp_path, 0, 5)
    run(tmp_path, 4, 6, resumed=3).close()
    assert steps(tmp_path) == [step for step in range(7) for _ in range(4)]


def test_resume_within_a_part(tmp_path):
    log = SampleLog(tmp_path, say=[].append)
    for attempt in range(40):
        add(log, attempt, attempt // 4)
    log.flush()
    run(tmp_path, 6, 6, resumed=5)
    assert steps(tmp_path) == [step for step in range(7) for _ in range(4)]


def test_resume_after_the_end(tmp_path):
    run(tmp_path, 0, 3).close()
    run(tmp_path, 3, 5, resumed=2).close()
    assert steps(tmp_path) == [step for step in range(6) for _ in range(4)]


def test_a_fresh_run_starts_empty(tmp_path):
    run(tmp_path, 0, 3).close()
    run(tmp_path, 0, 1)
    assert steps(tmp_path) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_crash_in_the_middle_of_merging(tmp_path, monkeypatch):
    """Merged, but the parts are still there: no row is lost, none is there twice."""
    run(tmp_path, 0, 3)
    monkeypatch.setattr(module.shutil, "rmtree", lambda path: None)
    merge(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "samples").exists()
    assert (tmp_path / "samples.parquet").exists()
    assert merge(tmp_path).height == 16
    assert steps(tmp_path) == [step for step in range(4) for _ in range(4)]


def test_buffer_is_flushed_when_large(tmp_path):
    log = SampleLog(tmp_path, say=[].append)
    for attempt in range(module._FLUSH_ROWS + 1):
        add(log, attempt, 0)
    assert read(tmp_path).height == module._FLUSH_ROWS
    log.close()
    assert read(tmp_path).height == module._FLUSH_ROWS + 1


def test_full_disk_is_said_once_and_loses_nothing(tmp_path, monkeypatch):
    said = []
    log = run(tmp_path, 0, 0, said)

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "replace_file", full)
    for step in (1, 2):
        add(log, step + 10, step)
        log.flush()
    assert len(said) == 1
    assert "No space left" in said[0]
    monkeypatch.undo()
    log.close()
    assert steps(tmp_path) == [0, 0, 0, 0, 1, 2]


def test_a_row_is_cheap(tmp_path):
    """Less than 5 us of CPU a row with writing; allowed 10 here, for slow machines."""
    log = SampleLog(tmp_path, say=[].append)
    began = time.process_time()
    for attempt in range(20_000):
        add(log, attempt, 0)
    log.flush()
    assert (time.process_time() - began) / 20_000 < 10e-6
