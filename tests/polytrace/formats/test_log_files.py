"""Files of logs: marks, line ends, arrays, packed, torn, copied, with wrong values."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from trace_lines import dump

from rollpacker.polytrace import formats
from rollpacker.polytrace.schema import TraceError

CASES = Path(__file__).parents[1] / "cases"
ROLLOUT = {"input": "q", "output": "x" * 40, "score": 1.0, "step": 1}


def test_marks_line_ends_and_arrays_are_taken(tmp_path: Path) -> None:
    rows = [ROLLOUT | {"input": f"q{n}"} for n in range(3)]
    text = {
        "mark": "\ufeff" + "\n".join(map(json.dumps, rows)),
        "crlf": "\r\n".join(map(json.dumps, rows)) + "\r\n\r\n",
        "array": json.dumps(rows),
        "pretty": json.dumps(rows, indent=2),
        "noend": "\n".join(map(json.dumps, rows)),
    }
    for name, content in text.items():
        path = tmp_path / name / "1.jsonl"
        path.parent.mkdir()
        path.write_bytes(content.encode())
        assert formats.read(path).samples["response_tokens"].to_list() == [10] * 3, name
        assert formats.problems(path) == [], name


def test_a_torn_line_is_left_out_and_said_once(tmp_path: Path) -> None:
    whole = "".join(json.dumps(ROLLOUT | {"input": f"q{n}"}) + "\n" for n in range(3))
    kinds: dict[str, bytes] = {
        "1.jsonl": whole[:-30].encode(),
        "2.jsonl.gz": gzip.compress(whole.encode(), mtime=0)[:-9],
        "3.jsonl": b"",
        "4.jsonl": json.dumps([ROLLOUT, ROLLOUT | {"step": 9}])[:-20].encode(),
        "5.jsonl.zst": (CASES / "v4_zst" / "1.jsonl.zst").read_bytes()[:200],
        "6.jsonl.gz": b"no gzip",
    }
    for name, content in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        dump(folder / "0.jsonl", ROLLOUT)
        (folder / name).write_bytes(content)
        notes: list[str] = []
        assert formats.read(folder, note=notes.append).samples.height >= 1
        left = [note for note in notes if "left out" in note]
        assert len(left) == 1, (name, notes)
        assert str(folder / name) in left[0]
        assert [each.file.name for each in formats.problems(folder)] == [name]


def test_files_that_are_unknown_are_named(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", ROLLOUT)
    dump(tmp_path / "other.jsonl", {"loss": 1.0})
    (tmp_path / "README.md").write_text("what this is")
    (tmp_path / "notes.txt").write_text("hm")
    notes: list[str] = []
    formats.read(tmp_path, note=notes.append)
    named = {"other.jsonl", "notes.txt"}
    assert {Path(note.split(":")[0]).name for note in notes if "left out" in note} == named
    assert {each.file.name for each in formats.problems(tmp_path)} == named


def test_a_file_beside_its_packed_copy_counts_once(tmp_path: Path) -> None:
    path = dump(tmp_path / "1.jsonl", *(ROLLOUT | {"input": f"q{n}"} for n in range(4)))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    notes: list[str] = []
    assert formats.read(tmp_path, note=notes.append).samples.height == 4
    assert sum("counted once" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"score": 10**400}, "score: expected a finite number"),
        ({"score": math.inf}, "score: expected a finite number, got Infinity"),
        ({"score": "1.0"}, 'score: expected a number, got "1.0"'),
        ({"response_length": -5}, "response_length: expected 0 to"),
        ({"response_length": "12"}, "response_length: expected a whole number"),
        ({"response_length": 1.5}, "response_length: expected a whole number, got 1.5"),
        ({"step": -1}, "step: expected 0 to"),
        ({"output": 5}, "output: expected text, got 5"),
        ({"input": None}, "input: missing"),
    ],
)
def test_wrong_numbers_are_told_in_one_line(
    tmp_path: Path, more: dict[str, Any], text: str
) -> None:
    path = dump(tmp_path / "1.jsonl", ROLLOUT, ROLLOUT | more)
    with pytest.raises(TraceError, match=re.escape(f"1.jsonl, line 2: {text}")):
        formats.read(path)
    (problem,) = formats.problems(path)
    assert problem.line == 2
    assert problem.text.startswith(text)


def test_a_score_that_is_no_number_is_none(tmp_path: Path) -> None:
    path = dump(tmp_path / "1.jsonl", ROLLOUT | {"score": math.nan, "response_length": 7.0})
    trace = formats.read(path)
    assert trace.samples.select("reward", "response_tokens").rows() == [(None, 7)]


@pytest.mark.parametrize("name", ["v4_gz", "v4_zst", "v6_names2", "t2_tools", "o_wandb"])
def test_who_watches_is_told_of_every_byte_once(name: str) -> None:
    told: list[int] = []
    formats.read(CASES / name, tick=told.append)
    assert sum(told) == sum(path.stat().st_size for path in (CASES / name).iterdir())


def lengths(folder: Path, name: str, *records: dict[str, Any]) -> list[int]:
    return formats.read(dump(folder / name, *records)).samples["response_tokens"].to_list()


def test_a_response_that_ends_in_a_tool_s_answer_has_none_of_it(tmp_path: Path) -> None:
    whole = "x" * 8 + "<tool_response>r</tool_response>" + "y" * 8
    torn = whole + "<tool_response>\n" + "r" * 400
    assert lengths(tmp_path, "1.jsonl", ROLLOUT | {"output": torn}) == [4]


def test_reasoning_beside_a_response_counts_once(tmp_path: Path) -> None:
    thought = {"reasoning_content": "t" * 80}
    assert lengths(tmp_path, "1.jsonl", ROLLOUT | thought) == [30]
    within = {"output": "<think>" + "t" * 80 + "</think>" + "x" * 5}
    assert lengths(tmp_path, "2.jsonl", ROLLOUT | thought | within) == [25]
    answered = {"output": "x" * 40 + "<tool_response>" + "r" * 400 + "</tool_response>"}
    assert lengths(tmp_path, "3.jsonl", ROLLOUT | thought | answered) == [30]


@pytest.mark.parametrize("packed", ["gzip", "zstd"])
def test_a_packed_file_is_known_by_its_content(tmp_path: Path, packed: str) -> None:
    content = gzip.compress(json.dumps(ROLLOUT).encode() + b"\n")
    if packed == "zstd":
        content = (CASES / "v4_zst" / "1.jsonl.zst").read_bytes()
    path = tmp_path / "1.jsonl"
    path.write_bytes(content)
    assert formats.read(path).samples.height > 0
    assert formats.problems(path) == []


def test_several_texts_in_one_line_are_refused_by_what_was_tried(tmp_path: Path) -> None:
    path = dump(tmp_path / "1.jsonl", {"input": "q", "output": ["one", "two"]})
    with pytest.raises(TraceError, match=r"output: .* a list of 2 texts.*verl's rollout dumps"):
        formats.read(path)
    path = dump(tmp_path / "dump.jsonl", {"input": "q", "output": "one"})
    with pytest.raises(TraceError, match=r"step: missing.*verl's rollout dumps"):
        formats.read(path)


@pytest.mark.parametrize("step", ["gen_step", "step"])
def test_ms_swift_logs_a_line_a_step(tmp_path: Path, step: str) -> None:
    lines = [
        {
            step: [number] * 2 if step == "gen_step" else [str(number)] * 2,
            "prompt": ["p", "p"],
            "completion": [f"{number}" * 40, f"{number}" * 80],
            "Accuracy": [1.0, 0.0],
            "Format": [0.5, 0.5],
            "advantages": [0.7, -0.7],
        }
        for number in (4, 8)
    ]
    trace = formats.read(dump(tmp_path / "completions.jsonl", *lines))
    assert trace.samples["step"].to_list() == [4, 4, 8, 8]
    assert trace.samples["response_tokens"].to_list() == [10, 20, 10, 20]
    assert trace.samples["reward"].to_list() == [1.5, 0.5, 1.5, 0.5]


def test_a_step_as_text_is_a_step(tmp_path: Path) -> None:
    row = {"step": "7", "prompt": "p", "completion": "x", "right": 1.0}
    trace = formats.read(dump(tmp_path / "completions.jsonl", row))
    assert trace.samples["step"].to_list() == [7]
