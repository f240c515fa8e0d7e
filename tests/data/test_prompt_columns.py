"""Prompts that several columns make, as public data sets have them."""

import json
from pathlib import Path

import pytest

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Row
from rollpacker.data.load import Loaded, load_guessed, load_rows


def load(folder: Path, *rows: dict, **settings) -> Loaded:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(DataConfig(path=str(path), **settings))


def only(folder: Path, row: dict, **settings) -> Row:
    (found,) = load(folder, row, **settings).rows
    return found


def message(folder: Path, row: dict, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, row, **settings)
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix(f"{folder / 'rows.jsonl'}")


ALPACA = {"instruction": "Add them.", "input": "1 and 1", "output": "2"}
HUMAN = {"from": "human", "value": "What is 1+1?"}
GPT = {"from": "gpt", "value": "2"}
USER = {"role": "user", "content": "What is 1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "said"),
    [
        (ALPACA, "Add them.\n\n1 and 1", "2", "instruction + input, answer <- output"),
        (ALPACA | {"answer": "two"}, "Add them.\n\n1 and 1", "two", "input, answer <- answer"),
        (ALPACA | {"input": "", "output": "3"}, "Add them.", "3", "prompt <- instruction, answer"),
        (
            {"instruction": "Who?", "context": "Ada wrote it.", "response": "Ada"},
            "Who?\n\nAda wrote it.",
            "Ada",
            "instruction + context, answer <- response",
        ),
        (
            {"context": "Ada wrote it.", "question": "Who?", "answer": "Ada"},
            "Ada wrote it.\n\nWho?",
            "Ada",
            "context + question, answer <- answer",
        ),
        (
            {"passage": "It rains.", "question": "It rains. Does it?", "answer": True},
            "It rains. Does it?",
            True,
            "passage + question",
        ),
        (
            {"question": "Add.", "starter_code": "def add(a, b):", "answer": ""},
            "Add.\n\ndef add(a, b):",
            "",
            "question + starter_code",
        ),
        ({"query": "1+1?", "response": "2"}, "1+1?", "2", "prompt <- query, answer <- response"),
        ({"problem": "1+1?", "solution": "2"}, "1+1?", "2", "prompt <- problem"),
        ({"conversations": [HUMAN, GPT]}, [USER], "2", "conversations, answer <- the assistant's"),
        ({"conversations": json.dumps([HUMAN, GPT])}, [USER], "2", "prompt <- conversations"),
        (
            {"system": "Be brief.", "conversations": [HUMAN, GPT]},
            [SYSTEM, USER],
            "2",
            "conversations, system turn <- system",
        ),
        (
            {"system_prompt": "Be brief.", "question": "What is 1+1?", "answer": "2"},
            [SYSTEM, USER],
            "2",
            "question, system turn <- system_prompt",
        ),
        (
            {"system_prompt": "Be long.", "messages": [SYSTEM, USER], "answer": "2"},
            [SYSTEM, USER],
            "2",
            "messages",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "2"}]}, [USER], "2", "messages"),
    ],
)
def test_a_layout_is_read_whole(tmp_path, row, prompt, answer, said):
    loaded = load(tmp_path, row)
    assert (loaded.rows[0].prompt, loaded.rows[0].answer) == (prompt, answer)
    assert said in loaded.mapping


def test_a_part_that_a_row_lacks_is_left_out(tmp_path):
    rows = [ALPACA, ALPACA | {"input": ""}, ALPACA | {"input": None}, ALPACA | {"input": " "}]
    prompts = [row.prompt for row in load(tmp_path, *rows, {**ALPACA, "input": float("nan")}).rows]
    assert prompts == ["Add them.\n\n1 and 1", *["Add them."] * 4]
    said = load(tmp_path, ALPACA | {"instruction": None}, ALPACA, missing="skip").mapping
    assert "row 0: no prompt in column 'instruction'" in said


def test_a_named_column_stands_alone(tmp_path):
    row = {"context": "Ada wrote it.", "question": "Who?", "answer": "Ada", "options": ["a", "b"]}
    assert only(tmp_path, row, input_key="question").prompt == "Who?"
    assert only(tmp_path, ALPACA, input_key="input", label_key="output").prompt == "1 and 1"


def test_turns_of_several_speakers(tmp_path):
    turns = [HUMAN, GPT, {"from": "human", "value": "And 2+2?"}, {"from": "gpt", "value": "4"}]
    row = only(tmp_path, {"conversations": turns})
    assert [turn["role"] for turn in row.prompt] == ["user", "assistant", "user"]
    assert (row.prompt[2]["content"], row.answer) == ("And 2+2?", "4")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "Which?", "choices": ["Bern", "Rome"], "answer": 1},
            ", row 0: column 'choices' holds answers to choose from, which the prompt in column "
            "'question' does not show: write them into it, or set data.input_key: question to do "
            "without",
        ),
        (
            {"question": "Which?", "choices": {"text": ["Bern"], "label": ["A"]}, "answer": "A"},
            ", row 0: column 'choices' holds answers to choose from",
        ),
        (
            {"question": "Which?", "options": '["Bern", "Rome"]', "answer": "A"},
            ", row 0: column 'options' holds answers to choose from",
        ),
        (
            {"question": "Who?", "context": {"title": ["A"]}, "answer": "Ada"},
            ", row 0: column 'context' belongs to the prompt in column 'question', but only text "
            "can be put together, found dict: set data.input_key: question to leave it out",
        ),
        (
            ALPACA | {"history": [["a", "b"]]},
            ", row 0: column 'history' holds earlier turns: put all turns into a column "
            "'messages', or set data.input_key: instruction to do without",
        ),
        (
            {"question": "Who?", "system_prompt": ["x"], "context": 3, "answer": "a"},
            ", row 0: column 'context' belongs to the prompt",
        ),
    ],
)
def test_what_a_prompt_would_lose_is_one_line(tmp_path, row, said):
    assert message(tmp_path, row).startswith(said)


def test_choices_that_the_prompt_shows(tmp_path):
    row = {"question": "Bern or Rome?", "choices": ["Bern", "Rome"], "answer": "Bern"}
    assert only(tmp_path, row).prompt == "Bern or Rome?"
    assert only(tmp_path, row | {"question": "Who?", "choices": None}).prompt == "Who?"
    assert only(tmp_path, row | {"question": "Who?", "options": {"n": 3}, "choices": []}).prompt


MBPP = {
    "task_id": 601,
    "text": "Write a function to find the longest chain.",
    "code": "class Pair(object):\r\n\tdef __init__(self, a, b):\r\n\t\tself.a = a\r\n" * 9,
    "test_list": ["assert longest(1) == 1"],
    "test_setup_code": "",
}
LIVE_CODE_BENCH = {
    "question_title": "A. Short Sort",
    "question_content": "There are three cards with letters a, b, c.",
    "question_id": "1873_A",
    "starter_code": "",
    "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]' * 20,
    "metadata": "{}",
}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (MBPP, "text"),
        (LIVE_CODE_BENCH, "question_content"),
        ({"riddle": "1 2 3 4", "n": "1"}, "riddle"),
        ({"riddle": "What is it?", "gold_reasoning": "It is " * 9, "code": "print( 1 )"}, "riddle"),
    ],
)
def test_a_guess_of_the_prompt_is_what_is_asked(tmp_path, row, column):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = load_guessed(DataConfig(path=str(path)), "unused")
    assert found.rows[0].prompt == row[column]


@pytest.mark.parametrize(
    "row",
    [
        {"solution": "It is 4 and so on.", "tests": '[{"input": "1 2", "output": "3"}]'},
        {"one": "Some words here.", "other": "And some more."},
        {"program": "def f( x ): return x", "blob": 'import sys\nprint( "x" )'},
    ],
)
def test_an_unclear_prompt_is_asked_for(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"no prompt column among .*: set data\.input_key$"):
        load_guessed(DataConfig(path=str(path)), "unused")
