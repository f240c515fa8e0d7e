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
from rollpacker.polytrace.formats import validate
from rollpacker.polytrace.schema import TraceError

CASES = Path(__file__).parent / "cases"
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
        assert validate.problems(path) == [], name


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
        assert [each.file.name for each in validate.problems(folder)] == [name]


def test_files_that_are_unknown_are_named(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", ROLLOUT)
    dump(tmp_path / "other.jsonl", {"loss": 1.0})
    (tmp_path / "README.md").write_text("what this is")
    (tmp_path / "notes.txt").write_text("hm")
    notes: list[str] = []
    formats.read(tmp_path, note=notes.append)
    named = {"other.jsonl", "notes.txt"}
    assert {Path(note.split(":")[0]).name for note in notes if "left out" in note} == named
    assert {each.file.name for each in validate.problems(tmp_path)} == named


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
    (problem,) = validate.problems(path)
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
