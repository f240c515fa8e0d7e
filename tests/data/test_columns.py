"""Which column is what, found over all rows; rows that lack something."""

import json
from pathlib import Path

import pytest

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.load import Loaded, load_rows


def load(folder: Path, *rows: dict, **settings) -> Loaded:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(DataConfig(path=str(path), **settings))


def message(folder: Path, *rows: dict, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, *rows, **settings)
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix(f"{folder / 'rows.jsonl'}")


FULL = {"prompt": "b", "answer": "1"}


@pytest.mark.parametrize("first", [{"prompt": "a"}, {"prompt": "a", "answer": None}, {"id": 3}])
def test_columns_are_found_whatever_the_first_row_lacks(tmp_path, first):
    loaded = load(tmp_path, first, FULL, missing="skip")
    assert [row.prompt for row in loaded.rows] == ["b"]
    assert "canonical: prompt <- prompt, answer <- answer" in loaded.mapping


def test_rows_without_something_are_refused_or_skipped_and_counted(tmp_path):
    rows = [FULL, {"prompt": "c", "answer": None}, {"prompt": None, "answer": "1"}, {"answer": "2"}]
    assert message(tmp_path, *rows) == (
        ", row 1: no answer in column 'answer' (and 2 rows more): set data.missing: skip to leave "
        "such rows out"
    )
    loaded = load(tmp_path, *rows, missing="skip")
    assert len(loaded.rows) == 1
    assert "3 incomplete rows skipped, first " in loaded.mapping
    assert "row 1: no answer in column 'answer'" in loaded.mapping
    assert message(tmp_path, FULL, *rows[1:], domain_key="kind").startswith(
        ": data.domain_key is 'kind' but the columns are"
    )
    loaded = load(tmp_path, FULL | {"kind": "x"}, FULL, missing="skip", domain_key="kind")
    assert len(loaded.rows) == 1


def test_when_every_row_lacks_something(tmp_path):
    rows = [{"prompt": "a", "label": "1"}, {"prompt": None, "label": "2"}]
    said = message(tmp_path, *rows, label_key="label.deep", missing="skip")
    assert said.startswith("data.missing: skip leaves no row: ")
    assert said.endswith("row 0: no answer in column 'label.deep' (and 1 rows more)")


def test_both_missing_columns_are_named(tmp_path):
    assert message(tmp_path, {"text": "a", "gold": "1"}) == (
        ": no prompt column and no answer column among ['text', 'gold']: set data.input_key and "
        "data.label_key ('' when no reward needs an answer)"
    )
    assert message(tmp_path, {"text": "a"}, {"gold": "1"}, label_key="") == (
        ": no prompt column among ['text', 'gold']: set data.input_key"
    )
    assert message(tmp_path, {"prompt": "a", "answer": None}) == (
        ": no answer column among ['prompt', 'answer'] ('answer' is empty in every row): set "
        "data.label_key ('' when no reward needs an answer)"
    )


def test_a_column_that_is_null_everywhere_is_none(tmp_path):
    loaded = load(tmp_path, {"prompt": None, "question": "a", "answer": None, "solution": "1"})
    assert "prompt <- question, answer <- solution" in loaded.mapping


def test_a_verl_row_with_json_text(tmp_path):
    model = json.dumps({"style": "rule", "ground_truth": "2"})
    row = {"data_source": "gsm8k", "prompt": "1+1", "reward_model": model}
    (loaded,) = load(tmp_path, {"prompt": "0+0", "reward_model": None}, row, missing="skip").rows
    assert (loaded.answer, loaded.domain) == ("2", "gsm8k")


def test_openrlhf_s_datasource_is_the_domain(tmp_path):
    rows = [{"input": f"{n}+1", "label": str(n), "datasource": n and f"d{n}"} for n in range(3)]
    rows[0]["datasource"] = None
    loaded = load(tmp_path, *rows)
    assert [row.domain for row in loaded.rows] == ["default", "d1", "d2"]
    assert "OpenRLHF: prompt <- input, answer <- label, domain <- datasource" in loaded.mapping


def test_ids_that_only_some_rows_have(tmp_path):
    loaded = load(tmp_path, FULL | {"id": "mine"}, {"prompt": "c", "answer": "2"})
    assert loaded.rows[0].id == "mine"
    assert "id <- id, else hash of prompt and answer" in loaded.mapping


def test_exclusion_finds_the_prompt_column_over_all_rows(tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"id": "x"}\n{"question": "b"}\n')
    loaded = load(tmp_path, FULL, {"prompt": "c", "answer": "1"}, exclude=str(held_out))
    assert [row.prompt for row in loaded.rows] == ["c"]
