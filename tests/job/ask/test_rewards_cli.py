import json
import re
import sys

import pytest
from typer.testing import CliRunner

from rollpacker.cli import app


def checked(*arguments: str, **given) -> dict:
    result = CliRunner().invoke(app, ["rewards", "check", *arguments, "--json"], **given)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        {"id": "a", "prompt": "How many?", "answer": "72 clips"},
        {"id": "b", "prompt": "How far?", "answer": "5 km"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_says_what_was_extracted_read_and_compared():
    result = CliRunner().invoke(
        app, ["rewards", "check", "--answer", "72 dollars", "--response", r"So \boxed{72 clips}."]
    )
    assert result.output.splitlines() == [
        "reward           math",
        "extracted        72 clips",
        r"found by         \boxed{}",
        "read as          72; unit clip",
        "right            72 dollars",
        "right read as    72; unit $",
        "compared         units differ: $ and clip",
        "score            0",
    ]


def test_a_row_of_a_file_is_named_by_its_id(rows):
    assert checked(str(rows), "--response", "72")["rewards"][0]["score"] == 1.0
    found = checked(str(rows), "--row", "b", "--response", "-", input="It is 5 s.")
    assert found["row"] == "b"
    assert found["rewards"][0]["compared"] == "units differ: km and s"
    assert checked(str(rows), "--answer", "7", "--response", "7")["rewards"][0]["score"] == 1.0


def test_the_rewards_of_a_job_with_their_options(rows, tmp_path):
    (tmp_path / "short.py").write_text(
        "def short(completions, **kwargs):\n    return [float(len(c) < 9) for c in completions]\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{path: none}}\ndata: {{path: {rows}}}\noutput: {tmp_path}/run\nrewards:\n"
        f"  - {{function: math, options: {{require_boxed: true}}}}\n"
        f"  - {{function: '{tmp_path}/short.py:short', name: short}}\n"
    )
    found = checked(str(job), "--response", "72 clips")["rewards"]
    assert [each["score"] for each in found] == [0.0, 1.0]
    assert found[0]["compared"] == "no \\boxed{} (require_boxed)"
    assert len(checked(str(job), "--reward", "math", "--response", "72")["rewards"]) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")
def test_every_test_of_a_program_has_its_verdict(tmp_path):
    row = {"id": "sum", "prompt": "Print the sum.", "answer": ""}
    tests = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "0 5\n", "stdout": "5\n"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"tests": tests}) + "\n")
    program = "```python\na, b = map(int, input().split())\nprint(a * b + 1)\n```"
    found = checked(str(path), "--response", program)["rewards"][0]
    assert (found["reward"], found["score"], found["tests_from"]) == ("code", 0.0, "tests")
    assert [test["verdict"] for test in found["tests"]] == ["pass", "fail"]
    result = CliRunner().invoke(app, ["rewards", "check", str(path), "--response", program])
    assert "                 found '1\\n'" in result.output.splitlines()


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ASSERTS = {"test_list": ["assert f() == 1"]}
PROGRAM = "```python\ndef f():\n    return 1\n```"


@pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")
@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (
            {"problem": "Write f.", "solutions": ["x"], "tests": [{"asserts": "assert f() == 1"}]},
            [],
        ),
        ({"text": "Write f.", "code": "def f(): return 1", **ASSERTS}, []),
        ({"question_content": "Write f.", **ASSERTS}, []),
        ({"one": "Write f.", "two": "Or write g.", **ASSERTS}, ["data.input_key=one"]),
    ],
)
def test_rows_for_programs_need_no_answer(tmp_path, row, keys):
    file = lines(tmp_path / "rows.jsonl", {"id": "r", **row})
    (found,) = checked(file, *keys, "--response", PROGRAM)["rewards"]
    assert (found["reward"], found["score"]) == ("code", 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")
def test_only_the_row_that_is_asked_for_matters(tmp_path):
    file = lines(
        tmp_path / "mix.jsonl",
        {"id": "c0", "prompt": "Write f.", "answer": "", **ASSERTS},
        {"id": "m1", "prompt": "2+2", "answer": "4"},
        {"id": "m2", "prompt": "2+3", "answer": ""},
        {"id": "m3", "prompt": "", "answer": "4"},
    )
    assert checked(file, "--row", "m1", "--response", "4")["rewards"][0]["score"] == 1.0
    found = checked(file, "--response", PROGRAM)
    assert (found["row"], found["rewards"][0]["score"]) == ("c0", 1.0)
    result = CliRunner().invoke(app, ["rewards", "check", file, "--row", "m2", "--response", "4"])
    assert isinstance(result.exception, ValueError)
    assert "answer" in str(result.exception)


def test_several_rewards_have_weights_and_a_total(rows, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{path: none}}\ndata: {{path: {rows}}}\noutput: {tmp_path}/run\nrewards:\n"
        "  - {function: math, weight: 2.0}\n"
        "  - {function: math, name: boxed, weight: 0.5, options: {require_boxed: true}}\n"
    )
    found = checked(str(job), "--response", "72 clips")
    assert [each["weight"] for each in found["rewards"]] == [2.0, 0.5]
    assert found["total"] == 2.0
    found = checked(str(job), "data.size=1", "--response", r"\boxed{72 clips}")
    assert found["total"] == 2.5
    said = CliRunner().invoke(app, ["rewards", "check", str(job), "--response", "72 clips"]).output
    assert said.splitlines()[-1] == "total            2"
    assert said.count("weight") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["rows.jsonl", "--reward", "code", "--response", "5"],
            "row a: reward 'code' cannot read the row's tests: answer: not JSON",
        ),
        (
            ["code.jsonl", "--answer", "5", "--response", "5"],
            "--answer: reward 'code' does not use an answer, since it runs the row's tests",
        ),
        (
            ["--reward", "code", "--answer", "5", "--response", "5"],
            "--answer: reward 'code' does not use an answer, since it runs the row's tests",
        ),
        (
            ["rows.jsonl", "train.beta=1", "--response", "5"],
            "override 'train.beta=1': for a file of rows only keys of 'data' can be set",
        ),
        (["rows.jsonl", "data.input_ky=a", "--response", "5"], "unknown key 'input_ky'; did you"),
        (
            ["odd.jsonl", "--response", "5"],
            "no prompt column among ['one', 'two']: set data.input_key",
        ),
        (["--answer", "5"], "give the response: --response TEXT, or --response-file FILE"),
        (["--response", "5"], "give --answer, or a FILE with the row"),
        (["rows.jsonl", "--row", "z", "--response", "5"], "--row: no row with id 'z' in"),
    ],
)
def test_mistakes_are_one_line(rows, arguments, message, monkeypatch):
    monkeypatch.chdir(rows.parent)
    lines(rows.parent / "code.jsonl", {"prompt": "Write f.", **ASSERTS})
    lines(rows.parent / "odd.jsonl", {"one": "some words", "two": "more words"})
    result = CliRunner().invoke(app, ["rewards", "check", *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


BROKEN = """
import time

def divides(completions, **_):
    return [1 / (len(completions) - 1)]

def typo(completions, anwser, **_):
    return [1.0]

def slow(completions, **_):
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("divides", r"row a: .*mine\.py:5 in divides: ZeroDivisionError: division by zero$"),
        ("typo", "'anwser', which is neither a column .* did you mean 'answer'"),
        ("slow", r"row a: timed out after 0\.2 s \(rewards\[\]\.timeout_s\)$"),
    ],
)
def test_what_a_function_raises_is_one_line_as_in_a_run(rows, tmp_path, name, said):
    (tmp_path / "mine.py").write_text(BROKEN)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{path: none}}\ndata: {{path: {rows}}}\noutput: {tmp_path}/run\n"
        f"rewards: [{{function: '{tmp_path}/mine.py:{name}', timeout_s: 0.2}}]\n"
    )
    result = CliRunner().invoke(app, ["rewards", "check", str(job), "--response", "5"])
    assert isinstance(result.exception, ValueError)
    assert re.search(said, str(result.exception)), result.exception
