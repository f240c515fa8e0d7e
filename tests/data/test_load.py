import csv
import json
from pathlib import Path

import polars
import pytest

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.load import load_rows

CHAT = [{"role": "user", "content": "What is 1+1?"}]


def jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path: str, **settings):
    return load_rows(DataConfig(path=path, **settings))


def roll_row(number: int) -> dict:
    turns = [{"role": "system", "content": "Box it."}, {"role": "user", "content": f"q{number}"}]
    return {
        "id": str(number),
        "prompt": f"q{number}",
        "messages": json.dumps(turns),
        "ground_truth": f"{number}",
        "case_type": "",
        "test_cases": "",
        "tag": "deepmath",
    }


def test_canonical_rows_keep_every_column(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2", "level": 3}])
    loaded = load(path)
    (row,) = loaded.rows
    assert (row.prompt, row.answer, row.domain) == ("1+1", "2", "default")
    assert row.columns == {"prompt": "1+1", "answer": "2", "level": 3}
    assert loaded.mapping == (
        f"{path}: 1 rows, canonical: prompt <- prompt, answer <- answer, one domain, "
        "id <- hash of prompt and answer"
    )


def test_a_verl_parquet_file(tmp_path):
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": CHAT,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7, "split": "train"},
        }
    ]
    path = tmp_path / "a.parquet"
    polars.DataFrame(rows).write_parquet(path)
    loaded = load(str(path))
    (row,) = loaded.rows
    assert (row.prompt, row.answer, row.domain) == (CHAT, "2", "gsm8k")
    assert row.columns["extra_info"] == {"index": 7, "split": "train"}
    assert row.columns["answer"] == "2"
    assert "verl: prompt <- prompt, answer <- reward_model.ground_truth" in loaded.mapping
    assert "domain <- data_source" in loaded.mapping


def test_a_roll_file_with_messages_as_a_string(tmp_path):
    loaded = load(jsonl(tmp_path / "a.jsonl", [roll_row(1), roll_row(2)]))
    first = loaded.rows[0]
    assert first.prompt == [
        {"role": "system", "content": "Box it."},
        {"role": "user", "content": "q1"},
    ]
    assert (first.id, first.answer, first.domain) == ("1", "1", "deepmath")
    assert "ROLL: prompt <- messages, answer <- ground_truth, domain <- tag" in loaded.mapping


def test_openrlhf_keys_and_a_domain_key(tmp_path):
    rows = [{"context_messages": CHAT, "gt": "2", "prompt": "not me", "kind": "sum"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    loaded = load(path, input_key="context_messages", label_key="gt", domain_key="kind")
    (row,) = loaded.rows
    assert (row.prompt, row.answer, row.domain) == (CHAT, "2", "sum")


@pytest.mark.parametrize("prompt", ["question", "problem", "prompt", "input"])
@pytest.mark.parametrize("answer", ["ground_truth", "solution", "label", "answer"])
def test_aliases(tmp_path, prompt, answer):
    (row,) = load(jsonl(tmp_path / "a.jsonl", [{prompt: "1+1", answer: "2"}])).rows
    assert (row.prompt, row.answer, row.columns["answer"]) == ("1+1", "2", "2")


def test_a_nested_label_key(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "extra": {"gold": "2"}}])
    assert load(path, label_key="extra.gold").rows[0].answer == "2"


def test_an_empty_label_key_means_no_answer(tmp_path):
    (row,) = load(jsonl(tmp_path / "a.jsonl", [{"prompt": "Tell a joke"}]), label_key="").rows
    assert row.answer is None
    assert row.columns == {"prompt": "Tell a joke"}


def test_csv_keeps_answers_as_text(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], ["a, b?", "007"], ["c", "1.50"]])
    assert [r.answer for r in load(str(path)).rows] == ["007", "1.50"]


def test_json_lists_wrapped_lists_and_lines_in_a_json_file(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    path = tmp_path / "a.json"
    for text in (json.dumps(rows), json.dumps({"data": rows}), "\n".join(map(json.dumps, rows))):
        path.write_text(text)
        assert [r.prompt for r in load(str(path)).rows] == ["a", "b"]


def test_line_separators_inside_strings(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"prompt": "a\u2028b", "answer": "1"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert load(str(path)).rows[0].prompt == "a\u2028b"


def test_a_hub_dataset_on_disk(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"prompt": "a", "answer": "1"}])
    jsonl(folder / "test.jsonl", [{"prompt": "b", "answer": "2"}])
    assert [r.prompt for r in load(str(folder), split="test").rows] == ["b"]
    with pytest.raises(DataError, match="cannot be loaded as a hub dataset \\(split 'dev'\\)"):
        load(str(folder), split="dev")


def test_reasoning_gym_rows_hold_the_whole_entry():
    import reasoning_gym

    options = {"min_value": 1, "max_value": 99}
    loaded = load("rg:gcd", options=options, size=5, seed=3)
    dataset = reasoning_gym.create_dataset("gcd", size=5, seed=3, **options)
    for row, entry in zip(loaded.rows, dataset, strict=True):
        assert row.prompt == entry["question"]
        kept = {name: row.columns[name] for name in ("question", "answer", "metadata")}
        assert kept == entry
        assert dataset.score_answer(row.answer, kept) == 1.0
    assert "reasoning-gym gcd: prompt <- question" in loaded.mapping


def test_functions_in_files_and_modules(tmp_path, monkeypatch):
    code = "def rows(n=2):\n    return ({'prompt': f'p{i}', 'answer': i} for i in range(n))\n"
    (tmp_path / "my_rows.py").write_text(code)
    assert len(load(f"{tmp_path / 'my_rows.py'}:rows", options={"n": 3}).rows) == 3
    monkeypatch.syspath_prepend(tmp_path)
    assert [r.answer for r in load("my_rows:rows").rows] == [0, 1]


def test_ids_are_stable_and_distinct(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(50)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    ids = [r.id for r in load(path).rows]
    assert len(set(ids)) == 50
    rows.reverse()
    shuffled = jsonl(tmp_path / "b.jsonl", [r | {"extra": 1} for r in rows])
    assert [r.id for r in load(shuffled).rows][::-1] == ids


def test_identical_rows_are_renamed_and_said(tmp_path):
    row = {"prompt": "a", "answer": "1"}
    loaded = load(jsonl(tmp_path / "a.jsonl", [row, row, {"prompt": "b", "answer": "1"}, row]))
    first = loaded.rows[0].id
    assert [r.id for r in loaded.rows if r.prompt == "a"] == [first, f"{first}#2", f"{first}#3"]
    assert "2 identical rows renamed with #2, #3 ..." in loaded.mapping


def test_size_takes_the_first_rows_that_are_not_excluded(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(10)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    held_out = jsonl(tmp_path / "b.jsonl", [{"question": "p1"}, {"question": "p3"}])
    loaded = load(path, size=4, exclude=held_out)
    assert [r.prompt for r in loaded.rows] == ["p0", "p2", "p4", "p5"]
    assert f"2 rows dropped that are in {held_out}" in loaded.mapping


def test_exclusion_by_id(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [roll_row(i) for i in range(4)])
    other = jsonl(tmp_path / "b.jsonl", [{"id": 1}, {"id": "3"}])
    assert [r.id for r in load(path, exclude=other).rows] == ["0", "2"]


def message(path: str, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files_name_their_neighbours(tmp_path):
    jsonl(tmp_path / "train_math.jsonl", [{"prompt": "a", "answer": "1"}])
    missing = tmp_path / "train_maths.jsonl"
    assert message(str(missing)) == (
        f"data.path: no file '{missing}'; did you mean 'train_math.jsonl'?"
    )
    nowhere = tmp_path / "no" / "a.csv"
    assert message(str(nowhere)) == f"data.path: no file '{nowhere}': no folder '{nowhere.parent}'"


def test_data_errors_say_what_and_where(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [])
    assert message(path) == f"data.path: '{path}' has no rows"
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "gold": "1"}])
    assert message(path) == (
        f"{path}: no answer column among ['prompt', 'gold']: set data.label_key "
        "('' when no reward needs an answer)"
    )
    jsonl(tmp_path / "a.jsonl", [{"text": "a", "answer": "1"}])
    expected = f"{path}: no prompt column among ['text', 'answer']: set data.input_key"
    assert message(path) == expected
    assert message(path, input_key="txt") == (
        f"{path}: data.input_key is 'txt' but the columns are ['text', 'answer']"
    )
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    leave_out = ": set data.missing: skip to leave such rows out"
    assert message(path) == f"{path}, row 1: no answer in column 'answer'{leave_out}"
    jsonl(tmp_path / "a.jsonl", [{"prompt": " ", "answer": "1"}])
    assert message(path) == f"{path}, row 0: the prompt is empty{leave_out}"
    jsonl(tmp_path / "a.jsonl", [{"prompt": 7, "answer": "1"}])
    assert message(path) == f"{path}, row 0: the prompt must be text or chat messages, found int"
    jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user"}], "answer": "1"}])
    assert message(path) == (
        f"{path}, row 0: a chat message needs text as 'role' and 'content', found str and NoneType"
    )
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}])
    assert message(path, exclude=path) == f"data.exclude: '{path}' holds every row of '{path}'"


def test_broken_files_name_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": \n')
    assert message(str(path)) == f"{path}, line 3: not JSON (Expecting value)"
    path.write_text("[1]\n")
    assert message(str(path)) == f"{path}, line 1: expected an object, found list"
    other = tmp_path / "a.json"
    other.write_text("3")
    assert message(str(other)) == f"{other}: expected a list of objects, found int"
    text = tmp_path / "a.txt"
    text.write_text("hello")
    assert message(str(text)) == (
        f"data.path: '{text}' is of no known type (known: .json, .jsonl, .parquet, .csv, .tsv, "
        ".arrow)"
    )
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1 not really")
    assert message(str(broken)).startswith(f"{broken}: cannot be read: ")


def test_bad_tasks_and_functions(tmp_path):
    assert message("rg:gdc") == (
        "data.path: reasoning-gym has no task 'gdc'; did you mean 'rg:gcd'?"
    )
    assert message("rg:gcd", options={"min_numbers": 0}).startswith(
        "data.options: task 'gcd': AssertionError"
    )
    file = tmp_path / "mine.py"
    file.write_text("def boom():\n    raise KeyError('x')\ndef seven():\n    return 7\n")
    assert message(f"{file}:nothing") == (
        f"data.path: '{file}' has no function 'nothing'; it has boom, seven"
    )
    assert message(f"{file}:boom") == f"data.path: {file}:boom: KeyError: 'x'"
    assert message(f"{file}:seven") == (
        f"data.path: {file}:seven: TypeError: expected rows, it returned int"
    )
    assert message("no_such_module:rows").startswith("data.path: cannot import 'no_such_module'")
