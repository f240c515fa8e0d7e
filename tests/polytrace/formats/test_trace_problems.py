"""Wrong traces are refused with file, line and field."""

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_lines import Record, dapo, dump, multiturn, packed, polytrace_folder, timing, turn

from rollpacker.polytrace import formats
from rollpacker.polytrace.formats.files import samples
from rollpacker.polytrace.formats.ours import native
from rollpacker.polytrace.schema import Trace, TraceError

WRONG = [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON (nested too deeply)"),
    ("[1]", "expected a JSON object"),
    (packed(step="0"), "step: expected a whole number"),
    (packed(step=True), "step: expected a whole number"),
    (packed(input=-1), "input: expected 0 to"),
    (packed(input=2**31), "input: expected 0 to"),
    (packed(output=[1, 2.5]), "output[1]: expected a whole number"),
    (packed(output=[1, -2]), "output[1]: expected 0 to"),
    (packed(output=[1, 2], n_sampling=3), "output: 2 lengths, but n_sampling is 3"),
    (packed(output=[]), "n_sampling: expected 1 to"),
    ({k: v for k, v in packed().items() if k != "rank"}, "rank: missing"),
    (packed(validate="no"), "validate: expected true or false"),
]


@pytest.mark.parametrize(("line", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, text: str) -> None:
    path = dump(tmp_path / "packed_lengths_step_0.jsonl", packed())
    bad = line if isinstance(line, str) else json.dumps(line)
    path.write_text(path.read_text() + "\n" + bad + "\n" + json.dumps(packed(local_index=9)) + "\n")
    with pytest.raises(TraceError) as error:
        formats.read(tmp_path)
    assert f"packed_lengths_step_0.jsonl, line 3: {text}" in str(error.value)
    assert "\n" not in str(error.value)
    found = formats.problems(tmp_path)
    assert [(each.file, each.line) for each in found] == [(path, 3)]
    assert found[0].text.startswith(text)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (multiturn(turns=[{"completion_tokens": -1}]), "turns[0].completion_tokens: expected 0"),
        (multiturn(turns=[turn(0, 2**31 - 1), turn(1, 1)]), "turns: completion_tokens add up to"),
        (multiturn(turns=[3]), "turns[0]: expected a JSON object"),
        (multiturn(turn_count=9), "turn_count: 9, but turns has 2 entries"),
        (multiturn(tool_calls=[{"latency_s": 1}]), "tool_calls[0].tool_name: missing"),
        (multiturn(turns=[turn(0, 1, engine_latency_s="x")]), "turns[0].engine_latency_s: exp"),
        (timing(reward_time_s=-1), "reward_time_s: expected 0 or more"),
        (timing(reward_time_s=math.inf), "reward_time_s: expected a number"),
        (dapo(kept=(0, 0)), "kept_prompt_indices: an index appears twice"),
        (dapo(kept=(0, 4)), "kept_prompt_indices: 4, but prompt_count is 4"),
        (dapo(kept_prompt_count=1), "kept_prompt_count: 1, but kept_prompt_indices has 2"),
    ],
)
def test_wrong_lines_of_other_formats_are_named(tmp_path: Path, line: Record, text: str) -> None:
    path = dump(tmp_path / "lines.jsonl", line)
    with pytest.raises(TraceError) as error:
        formats.read(path)
    assert f"lines.jsonl, line 1: {text}" in str(error.value)


def test_a_torn_last_line_is_said_to_be_torn(tmp_path: Path) -> None:
    path = dump(tmp_path / "packed_lengths_step_0.jsonl", packed(), packed(local_index=1))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TraceError, match=r"line 2: not JSON .*the file ends within this line"):
        formats.read(path)


def test_validate_lists_every_problem(tmp_path: Path) -> None:
    polytrace_folder(tmp_path)
    dump(tmp_path / "reward_timings_step_0.jsonl", timing(response_sum=1), timing(response_sum=121))
    dump(tmp_path / "dapo_filter_indices.jsonl", dapo(), dapo(2, 5))
    path = tmp_path / "packed_lengths_step_10.jsonl"
    path.write_bytes(b'{"step": "\xff"}\n{}\n')
    (tmp_path / "packed_lengths_step_11.jsonl").touch()
    found = [(each.file.name, each.line, each.text) for each in formats.problems(tmp_path)]
    assert found == [
        ("packed_lengths_step_10.jsonl", 1, "not UTF-8 text"),
        ("packed_lengths_step_10.jsonl", 2, "step: missing"),
        ("packed_lengths_step_11.jsonl", 0, "empty"),
        ("reward_timings_step_0.jsonl", 1, "response_sum: 1, but the lengths add up to 121"),
        ("dapo_filter_indices.jsonl", 2, "prompt_count: 5, but step 2 has 2 prompts"),
    ]


def test_paths_without_a_trace_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "some.txt").write_text("hi")
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "packed_lengths_step_0.jsonl").touch()
    expected = {
        "gone": "no such file or folder",
        "empty": "expected PolyTrace's",
        "some.txt": "expected *.jsonl or *.parquet",
        "x.json": "its first lines fit no format",
        "x.jsonl": "its first lines fit no format; known formats: packed_lengths",
        "packed_lengths_step_0.jsonl": "no responses in it",
    }
    for name, text in expected.items():
        with pytest.raises(TraceError) as error:
            formats.read(tmp_path / name)
        assert text in str(error.value)
        assert str(tmp_path / name) in str(error.value)
        assert "\n" not in str(error.value)
        assert len(formats.problems(tmp_path / name)) == 1
    with pytest.raises(TraceError, match="unknown format 'csv'; known: packed_lengths"):
        formats.read(tmp_path, format="csv")
    with pytest.raises(TraceError, match="cannot write 'trl'; formats: native"):
        formats.write(Trace(samples=samples([])), tmp_path, "trl")


def test_one_name_for_several_tasks_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        dump(tmp_path / name / "packed_lengths_step_0.jsonl", packed(output=[ord(name)]))
    with pytest.raises(TraceError, match="one task name for 2 tasks"):
        formats.read(tmp_path, task="x")
    formats.write(formats.read(tmp_path), tmp_path / "t.parquet", "native")
    with pytest.raises(TraceError, match="one task name for 2 tasks"):
        formats.read(tmp_path / "t.parquet", task="x")
    assert formats.read(tmp_path / "a", task="x").tasks == ["x"]


def test_native_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    trace = Trace(samples=samples([{"task": "t", "step": 0, "response_tokens": -3}]))
    path = tmp_path / "t.parquet"
    native.write(trace, path)
    assert [each.text for each in formats.problems(path)] == [
        "row 1: response_tokens: -3 is not allowed",
        "row 1: index: None is not allowed",
        "row 1: prompt: None is not allowed",
        "row 1: state: None is not allowed",
    ]
    trace.samples.write_parquet(path, metadata={native.KEY: "99"})
    with pytest.raises(TraceError, match="schema version 99, this rollpacker reads version 1"):
        native.read(path)
    trace.samples.drop("cap").write_parquet(path, metadata={native.KEY: "1"})
    with pytest.raises(TraceError, match="column cap is missing"):
        native.read(path)
    trace.samples.cast({"step": pl.Float64()}).write_parquet(path, metadata={native.KEY: "1"})
    with pytest.raises(TraceError, match="column step: expected Int32, got Float64"):
        native.read(path)
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(TraceError, match="not a parquet file"):
        native.read(path)
    trace.samples.write_parquet(path)
    with pytest.raises(TraceError, match="no native trace"):
        native.read(path)
