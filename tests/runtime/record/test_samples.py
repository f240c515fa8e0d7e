import errno
import os
import random

import numpy as np
import polars as pl
import pytest

from rollpacker.config import SamplesConfig
from rollpacker.core.sample_columns import REQUIRED, TEXTS, files
from rollpacker.core.types import AttemptId, EngineId, PromptId, RoundKind
from rollpacker.runtime.record import sample_table as table
from rollpacker.runtime.record import samples as module
from rollpacker.runtime.record.sample_table import merge, read
from rollpacker.runtime.record.samples import SampleLog, SampleRow


def add(log, attempt, step, **other):
    row = {
        "prompt": PromptId(f"prompt-{attempt // 4}"),
        "attempt": AttemptId(attempt),
        "sample_index": attempt % 4,
        "step": step,
        "round_kind": RoundKind.SHORT,
        "worker": EngineId(attempt % 2),
        "weights_version": step,
        "prompt_tokens": 17,
        "tokens": 100 + attempt,
        "finish_reason": "stop",
        "state": "kept",
        "start_s": 0.5 * attempt,
        "end_s": 0.5 * attempt + 3,
        "reward": 0.25,
        "grade_s": 0.01,
        "rewards": {"math": 0.25},
        "advantage": -0.5,
        "stale_tokens": 0,
        "prompt_text": "What is 1 + 1?",
        "completion": f"It is {attempt}.",
        "answer": "2",
        "completion_ids": np.array([5, attempt], np.int32),
    }
    log.add(SampleRow(**(row | other)))


def run(folder, first, last, said=None, resumed=-1, **config):
    """Steps of four attempts each, flushed after each step; not closed, as after a crash."""
    say = (said if said is not None else []).append
    log = SampleLog(folder, SamplesConfig(**config), last_step=resumed, say=say)
    for step in range(first, last + 1):
        for attempt in range(4 * step, 4 * step + 4):
            add(log, attempt, step)
        log.flush()
    return log


def steps(folder):
    return read(folder)["step"].to_list()


def test_rows_come_back(tmp_path):
    rewards = ["math", "style"]
    log = SampleLog(tmp_path, SamplesConfig(token_ids=True), say=[].append, rewards=rewards)
    for attempt in range(8):
        add(log, attempt, attempt // 4)
    nothing = dict.fromkeys(("finish_reason", "reward", "grade_s", "completion"))
    add(log, 99, 1, state="failed", completion_ids=None, rewards={}, **nothing)
    log.close()
    frame = pl.read_parquet(tmp_path / "samples.parquet")
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
        "tokens": 105,
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
        "rewards/style": None,
        "prompt_text": "What is 1 + 1?",
        "completion": "It is 5.",
        "answer": "2",
        "completion_ids": [5, 5],
    }
    last = frame.row(8, named=True)
    assert [last[name] for name in (*nothing, "completion_ids")] == [None] * 5
    assert (last["truncated"], last["rewards/math"]) == (None, None)
    assert not (tmp_path / "samples").exists()


def test_no_rows(tmp_path):
    SampleLog(tmp_path, say=[].append).close()
    assert read(tmp_path).height == 0
    assert dict(read(tmp_path).schema) == REQUIRED | TEXTS


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
    monkeypatch.setattr(table.shutil, "rmtree", lambda path: None)
    merge(tmp_path, [].append)
    monkeypatch.undo()
    assert (tmp_path / "samples").exists()
    assert (tmp_path / "samples.parquet").exists()
    merge(tmp_path, [].append)
    assert not (tmp_path / "samples").exists()
    assert steps(tmp_path) == [step for step in range(4) for _ in range(4)]


def test_long_texts_do_not_wait_in_memory(tmp_path):
    """A crash loses at most a megabyte of rows."""
    log = SampleLog(tmp_path, say=[].append)
    for attempt in range(30):
        add(log, attempt, 0, completion="x" * 100_000)
    assert read(tmp_path).height == 22
    add(log, 30, 0)
    log.flush()
    assert read(tmp_path).height == 31


def test_rows_of_finished_steps_are_written_after_a_while(tmp_path):
    log = SampleLog(tmp_path, say=[].append, flush_s=0.0)
    add(log, 0, 0)
    assert read(tmp_path).height == 0
    log.end_step()
    assert read(tmp_path).height == 1
    patient = SampleLog(tmp_path, say=[].append, last_step=0, flush_s=1e9)
    add(patient, 1, 1)
    patient.end_step()
    assert read(tmp_path).height == 1


def test_without_texts_none_are_kept(tmp_path):
    run(tmp_path, 0, 0, texts=False).close()
    columns = pl.read_parquet(tmp_path / "samples.parquet").columns
    assert columns == [*REQUIRED]


def test_what_is_kept_may_change_when_a_run_goes_on(tmp_path):
    run(tmp_path, 0, 1, texts=False).close()
    run(tmp_path, 2, 2, resumed=1, token_ids=True).close()
    frame = read(tmp_path)
    assert frame["completion"].is_null().to_list() == [True] * 8 + [False] * 4
    assert frame["completion_ids"].is_null().sum() == 8


def test_files_of_an_earlier_and_of_a_later_version(tmp_path):
    run(tmp_path, 0, 0).close()
    file = tmp_path / "samples.parquet"
    pl.read_parquet(file).select(*REQUIRED).write_parquet(file)
    run(tmp_path, 1, 2, resumed=0)
    later = tmp_path / "samples" / "part-000001.parquet"
    pl.read_parquet(later).with_columns(novelty=pl.lit("new")).write_parquet(later)
    run(tmp_path, 3, 3, resumed=2).close()
    frame = pl.read_parquet(file)
    assert frame["step"].to_list() == [step for step in range(4) for _ in range(4)]
    assert frame["completion"].is_null().to_list() == [True] * 4 + [False] * 12
    assert frame["novelty"].to_list() == [None] * 8 + ["new"] * 4 + [None] * 4


def long_run(folder, first, last, said, **config):
    """Steps whose texts cannot be compressed: 12 kB each."""
    folder.mkdir(exist_ok=True)
    say, rng = said.append, random.Random(first)
    log = SampleLog(folder, SamplesConfig(**config), last_step=first - 1, say=say)
    for attempt in range(4 * first, 4 * last + 4):
        text = rng.randbytes(3_000).hex()
        add(log, attempt, attempt // 4, completion=text, completion_ids=None)
        if attempt % 4 == 3:
            log.flush()
    log.close()
    return sum(path.stat().st_size for path in files(folder))


def test_at_the_size_limit_the_oldest_texts_go_and_the_numbers_stay(tmp_path):
    said = []
    whole = long_run(tmp_path / "all", 0, 19, said)
    limit = 150_000
    assert whole > limit
    size = long_run(tmp_path / "less", 0, 19, said, max_gb=limit / 1e9)
    assert size <= limit
    assert len(said) == 1
    assert "samples.max_gb" in said[0]
    numbers = [*REQUIRED]
    less, every = read(tmp_path / "less"), read(tmp_path / "all")
    assert less.select(numbers).equals(every.select(numbers))
    gone = less["completion"].is_null().to_list()
    assert gone == sorted(gone, reverse=True)
    assert 0 < sum(gone) < 80
    kept = less.filter(pl.col("completion").is_not_null())
    assert kept["completion"].to_list() == every["completion"].to_list()[sum(gone) :]


def test_the_size_limit_holds_for_what_an_earlier_run_has_left(tmp_path):
    said = []
    whole = long_run(tmp_path, 0, 19, said)
    size = long_run(tmp_path, 20, 21, said, max_gb=0.5 * whole / 1e9)
    assert size <= whole / 2
    frame = read(tmp_path)
    assert frame.height == 88
    gone = frame["completion"].is_null().to_list()
    assert gone == sorted(gone, reverse=True)
    assert 40 < sum(gone) < 70


def test_prompts_are_stored_once(tmp_path):
    """A thousand responses to eight long prompts: their text costs little more than eight."""
    rng = random.Random(0)
    prompts = [rng.randbytes(2_000).hex() for _ in range(8)]
    log = SampleLog(tmp_path, say=[].append)
    for attempt in range(1_000):
        add(log, attempt, 0, prompt_text=prompts[attempt % 8], completion="")
    log.close()
    assert (tmp_path / "samples.parquet").stat().st_size < 6 * sum(map(len, prompts))


def test_half_a_surrogate_pair_does_not_end_a_run(tmp_path):
    log = SampleLog(tmp_path, say=[].append)
    add(log, 0, 0, prompt=PromptId("\ud83d"), completion="\udc00 and \u20ac")
    log.close()
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
    part = tmp_path / "samples" / "part-000001.parquet"
    good, seen = part.read_bytes(), 0
    for bad in damages(part, 60, seed=1):
        part.write_bytes(bad)
        said = []
        log = run(tmp_path, 3, 3, said, resumed=2)
        aside = list(tmp_path.glob("*.damaged*"))
        assert len(said) == len(aside) <= 1
        if aside:
            seen += 1
            assert "part-000001.parquet" in said[0]
            assert "\n" not in said[0]
            assert steps(tmp_path) == [0] * 4 + [2] * 4 + [3] * 4
            assert aside[0].read_bytes() == bad
            aside[0].unlink()
        else:
            assert log is not None
        part.write_bytes(good)
    assert seen > 30


def test_a_damaged_whole_is_moved_aside_and_named(tmp_path):
    for number in range(2):
        run(tmp_path, 0, 0).close()
        file = tmp_path / "samples.parquet"
        file.write_bytes(file.read_bytes()[:-100])
        said = []
        run(tmp_path, 1, 1, said, resumed=0).close()
        aside = "samples.parquet.damaged" + ("-2" if number else "")
        assert said == [f"WARNING {file}: {said[0].split(': ', 1)[1]}"]
        assert said[0].endswith(f"moved to {aside}, its rows are missing in samples.parquet")
        assert (tmp_path / aside).exists()
        assert steps(tmp_path) == [1] * 4
        file.unlink()


def test_damage_during_the_run_does_not_spoil_the_end(tmp_path):
    said = []
    log = run(tmp_path, 0, 3, said)
    part = tmp_path / "samples" / "part-000002.parquet"
    part.write_bytes(part.read_bytes()[:500])
    log.close()
    assert [line.startswith(f"WARNING {part}") for line in said] == [True]
    assert pl.read_parquet(tmp_path / "samples.parquet")["step"].unique().to_list() == [0, 1, 3]
    assert not (tmp_path / "samples").exists()


def test_a_whole_file_that_lacks_columns_is_damaged(tmp_path):
    run(tmp_path, 0, 1)
    part = tmp_path / "samples" / "part-000000.parquet"
    pl.read_parquet(part).drop("step").write_parquet(part)
    said = []
    run(tmp_path, 2, 2, said, resumed=1)
    assert "lacks the columns step" in said[0]
    assert steps(tmp_path) == [1] * 4 + [2] * 4


def test_full_disk_is_said_once_and_loses_nothing(tmp_path, monkeypatch):
    said = []
    log = run(tmp_path, 0, 0, said)
    tried = []

    def full(path, data):
        tried.append(pl.read_parquet(data).height)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "replace_file", full)
    for step in (1, 2, 3):
        add(log, step + 10, step)
        log.flush()
    assert tried == [1, 1, 1]  # rows that have waited are not encoded again with the new ones
    assert len(said) == 1
    assert "No space left" in said[0]
    monkeypatch.undo()
    log.close()
    assert steps(tmp_path) == [0, 0, 0, 0, 1, 2, 3]


def test_a_row_is_cheap(tmp_path, calls):
    """Less than 10 us of CPU a row with its text and its writing."""
    log = SampleLog(tmp_path, say=[].append, rewards=["math"])

    def act():
        for attempt in range(1000):
            add(log, attempt, 0)
        log.flush()

    assert calls(act) / 1000 < 40
