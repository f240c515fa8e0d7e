"""What the responses of a log said."""

from pathlib import Path

import polars as pl
import pytest
from trace_lines import dump

from rollpacker.polytrace.formats.logs.texts import prompt_id
from rollpacker.polytrace.formats.said import Said, responses

Q = prompt_id("q")


def test_of_a_run_those_that_ended(tmp_path: Path) -> None:
    rows = {
        "step": [0, 0, 1],
        "prompt": ["p", "p", "q"],
        "attempt": [0, 1, 2],
        "finish_reason": ["stop", "abort", "length"],
        "sample_index": [0, 1, 0],
        "prompt_tokens": [1, 1, 1],
        "tokens": [2, 1, 2],
        "state": ["kept", "aborted", "kept"],
        "completion": ["a b", "a", "c d"],
    }
    (tmp_path / "journal.jsonl").touch()
    part = tmp_path / "samples" / "step-000000.parquet"
    pl.DataFrame(rows).write_parquet(part, mkdir=True)
    assert [*responses(tmp_path)] == [Said(0, "p", "a b"), Said(1, "q", "c d")]
    ids = pl.DataFrame(rows | {"completion_ids": [[1, 2], [1], None]})
    ids.write_parquet(part)
    found = [*responses(tmp_path)]
    assert found == [Said(0, "p", [1, 2]), Said(1, "q", "c d")]
    ids.drop("completion", "completion_ids").write_parquet(part)
    assert [*responses(tmp_path)] == []


def test_of_verl_texts_or_ids(tmp_path: Path) -> None:
    for step, ids in ((1, {}), (2, {"response_ids": [7, 8]})):
        dump(tmp_path / f"{step}.jsonl", {"input": "q", "output": "a b", "score": 1.0, **ids})
    assert [*responses(tmp_path)] == [Said(1, Q, "a b"), Said(2, Q, [7, 8])]


def test_steps_come_in_order_and_what_no_token_can_be_is_none(tmp_path: Path) -> None:
    lines = [
        {"input": "q", "output": f"{step}", "step": step, "response_ids": ids}
        for step, ids in ((2, [1.5]), (1, [None]), (2, [1 << 40]))
    ]
    dump(tmp_path / "log.jsonl", *lines)
    assert [*responses(tmp_path)] == [Said(n, Q, f"{n}") for n in (1, 2, 2)]


def test_of_trl_what_was_trained_on(tmp_path: Path) -> None:
    rows = {
        "step": [1, 1],
        "prompt": ["q", "q"],
        "completion": ["a", "b"],
        "mode": ["train", "eval"],
    }
    pl.DataFrame(rows).write_parquet(tmp_path / "completions_00001.parquet")
    again = pl.DataFrame(rows | {"step": [2, 2]})
    again.write_parquet(tmp_path / "completions_00002.parquet")
    assert [*responses(tmp_path)] == [Said(1, Q, "a")]


def test_of_several_tasks_one(tmp_path: Path) -> None:
    for task in ("one", "two"):
        dump(tmp_path / task / "1.jsonl", {"input": "q", "output": task, "score": 1.0})
    assert [each.said for each in responses(tmp_path, "two")] == ["two"]
    assert len([*responses(tmp_path)]) == 2


def test_lengths_alone_say_nothing(tmp_path: Path) -> None:
    dump(tmp_path / "packed_lengths_step_0.jsonl", {"input": [3], "output": [5]})
    assert [*responses(tmp_path)] == []


@pytest.mark.parametrize("step", [None, "x"])
def test_a_wrong_line_is_named(tmp_path: Path, step: object) -> None:
    dump(tmp_path / "log.jsonl", {"input": "q", "output": "a", "step": step})
    with pytest.raises(ValueError, match="line 1: step"):
        [*responses(tmp_path)]
