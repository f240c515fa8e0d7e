"""What a row's prompt may be: turns that call tools, blocks of text, a gold answer at the end."""

import json
from pathlib import Path

import polars
import pytest

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Row
from rollpacker.data.load import Loaded, load_rows

USER = {"role": "user", "content": "What is 1+1?"}
GOLD = {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call_1"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}},
}


def load(folder: Path, *rows: dict, kind: str = "jsonl", **settings) -> Loaded:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        polars.DataFrame(list(rows), infer_schema_length=None, strict=False).write_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(DataConfig(path=str(path), **settings))


def only(loaded: Loaded) -> Row:
    (row,) = loaded.rows
    return row


def message(folder: Path, *rows: dict, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, *rows, **settings)
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix(f"{folder / 'rows.jsonl'}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_turns_keep_all_that_a_template_may_read(tmp_path, kind):
    prompt = [USER, CALLS, RESULT]
    row = only(load(tmp_path, {"prompt": prompt, "answer": "2"}, kind=kind))
    assert row.prompt == prompt


def test_keys_that_only_other_rows_have_are_not_in_a_table_s_rows(tmp_path):
    rows = [
        {"prompt": [USER], "answer": "2", "tools": []},
        {"prompt": [USER, CALLS, RESULT], "answer": "2", "tools": [TOOL]},
    ]
    plain, calling = load(tmp_path, *rows, kind="parquet").rows
    assert plain.prompt == [USER]
    assert calling.prompt == [USER, CALLS, RESULT]
    assert (plain.tools, len(calling.tools)) == ([], 1)


def test_blocks_of_text_are_text(tmp_path):
    blocks = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]
    prompt = [{"role": "user", "content": blocks}]
    row = only(load(tmp_path, {"prompt": prompt, "answer": "2"}))
    assert row.prompt == [{"role": "user", "content": "What is\n1+1?"}]


def test_blocks_of_other_things_are_refused(tmp_path):
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert message(tmp_path, {"prompt": picture, "answer": "2"}) == (
        ", row 0: a chat message has content of type 'image_url', but models are trained on text "
        "alone"
    )
    empty = [{"role": "user", "content": [{"type": "text"}]}]
    assert "of type 'text' has no text" in message(tmp_path, {"prompt": empty, "answer": "2"})


@pytest.mark.parametrize("name", ["image", "images", "videos", "audio"])
def test_columns_for_eyes_and_ears_are_refused(tmp_path, name):
    rows = [{"prompt": "a", "answer": "1", name: []}, {"prompt": "b", "answer": "1", name: ["x"]}]
    assert f", row 1: column '{name}' holds " in message(tmp_path, *rows)
    rows[1][name] = None
    assert len(load(tmp_path, *rows).rows) == 2


def test_a_gold_answer_at_the_end_is_cut_and_is_the_answer(tmp_path):
    loaded = load(tmp_path, {"messages": [USER, GOLD]}, {"messages": [USER, CALLS, RESULT, GOLD]})
    assert [row.prompt for row in loaded.rows] == [[USER], [USER, CALLS, RESULT]]
    assert [row.answer for row in loaded.rows] == ["2", "2"]
    assert loaded.rows[0].columns["answer"] == "2"
    assert "answer <- the assistant's last turn" in loaded.mapping
    assert "the assistant's last turn is cut from 2 prompts" in loaded.mapping


def test_the_answer_column_wins_over_a_gold_turn(tmp_path):
    rows = [
        {"prompt": [USER, GOLD], "answer": "two"},
        {"prompt": [{"role": "user", "content": "Hi"}, GOLD], "answer": None},
    ]
    loaded = load(tmp_path, *rows)
    assert [row.answer for row in loaded.rows] == ["two", "2"]
    assert [len(row.prompt) for row in loaded.rows] == [1, 1]
    assert only(load(tmp_path, rows[0], label_key="")).answer is None


def test_rows_of_which_only_some_end_in_a_gold_answer(tmp_path):
    rows = [{"prompt": [USER]}, {"prompt": [USER, GOLD]}]
    assert message(tmp_path, *rows).startswith(
        ", row 0: no answer: the prompt does not end in a text of the assistant: set "
    )
    assert len(load(tmp_path, *rows, missing="skip").rows) == 1


def test_a_last_turn_that_only_calls_tools_is_cut_and_is_no_answer(tmp_path):
    loaded = load(tmp_path, {"prompt": [USER, CALLS], "answer": "2"})
    assert (only(loaded).prompt, only(loaded).answer) == ([USER], "2")
    assert "is cut from 1 prompts" in loaded.mapping
    said = message(tmp_path, {"prompt": [USER, CALLS]}, {"prompt": [USER, GOLD]})
    assert said.startswith(", row 0: no answer: the prompt does not end in a text")


def test_turns_of_the_assistant_alone(tmp_path):
    assert message(tmp_path, {"prompt": [GOLD], "answer": "2"}) == (
        ", row 0: the prompt has only turns of the assistant, nothing to answer"
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_template_arguments(tmp_path, as_text):
    kwargs = {"enable_thinking": False}
    row: dict = {"prompt": [USER], "answer": "2", "tools": [TOOL], "chat_template_kwargs": kwargs}
    if as_text:
        row |= {name: json.dumps(row[name]) for name in ("tools", "chat_template_kwargs")}
    loaded = only(load(tmp_path, row))
    assert (loaded.tools, loaded.template_kwargs) == ([TOOL], kwargs)


@pytest.mark.parametrize("value", ["hammer", "[1]", 7, ["hammer"]])
def test_tools_that_are_none(tmp_path, value):
    said = message(tmp_path, {"prompt": "a", "answer": "2", "tools": value})
    assert said.startswith(", row 0: column 'tools' must be a list of JSON schemas")


def test_template_arguments_that_are_none(tmp_path):
    said = message(tmp_path, {"prompt": "a", "answer": "2", "chat_template_kwargs": "fast"})
    assert said == ", row 0: column 'chat_template_kwargs' must be an object"


def test_content_may_be_null_beside_tool_calls_only(tmp_path):
    said = message(tmp_path, {"prompt": [USER, {"role": "user", "content": None}], "answer": "2"})
    assert "needs text as 'role' and 'content', found str and NoneType" in said


def test_half_a_character(tmp_path):
    rows = [{"prompt": "\ud800", "answer": "2"}, {"prompt": [{**USER, "content": "\ud800"}]}]
    for row in rows:
        assert "half a character" in message(tmp_path, row | {"answer": "2"})
