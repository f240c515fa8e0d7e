"""Which column is what, found over all rows; rows that lack something."""

import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import numpy as np
import polars
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


NAN = float("nan")


def write(path: Path, *rows: dict) -> str:
    """As pandas writes them: all rows with all columns, NaN where one is missing."""
    frame = polars.DataFrame(rows, strict=False)
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    elif path.suffix == ".csv":
        frame.write_csv(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_nan_is_no_answer(tmp_path, kind):
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": NAN}]
    path = write(tmp_path / f"rows.{kind}", *rows)
    loaded = load_rows(DataConfig(path=path, missing="skip"))
    assert [str(row.answer) for row in loaded.rows] == ["1.5"]
    assert "1 incomplete rows skipped, first " in loaded.mapping
    with pytest.raises(DataError, match=r"row 1: no answer in column 'answer': set data\.missing"):
        load_rows(DataConfig(path=path))


class NAType:
    """pandas' NA is neither equal nor unequal to anything."""

    def __ne__(self, other: object) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    __hash__ = None


@pytest.mark.parametrize(
    "nothing",
    [NAN, np.float32("nan"), np.datetime64("NaT"), Decimal("NaN"), NAType(), [NAN], [NAN, NAN]],
    ids=lambda value: type(value).__name__,
)
def test_whatever_stands_for_no_value(monkeypatch, nothing):
    rows = [
        {"prompt": "a", "answer": "1", "kind": "x", "images": nothing, "tools": nothing},
        {"prompt": "b", "answer": nothing, "kind": "x"},
        {"prompt": nothing, "answer": "1", "kind": "x"},
        {"prompt": "c", "answer": "1", "kind": nothing},
        {"prompt": "d", "answer": "1", "kind": "x", "chat_template_kwargs": nothing, "id": nothing},
        {"prompt": [{"role": "user", "content": "e", "name": nothing}], "answer": 1, "kind": "x"},
    ]
    module = ModuleType("nothing_rows")
    vars(module)["rows"] = lambda: rows
    monkeypatch.setitem(sys.modules, "nothing_rows", module)
    config = DataConfig(path="nothing_rows:rows", missing="skip", domain_key="kind")
    loaded = load_rows(config)
    chat = [{"role": "user", "content": "e"}]
    assert [row.prompt for row in loaded.rows] == ["a", "d", chat]
    assert "3 incomplete rows skipped" in loaded.mapping
    assert "id <- hash of prompt and answer" in loaded.mapping


def test_a_list_with_some_values_is_an_answer(tmp_path):
    loaded = load(tmp_path, {"prompt": "a", "answer": ["1", None]}, {"prompt": "b", "answer": [0]})
    assert [row.answer for row in loaded.rows] == [["1", None], [0]]


def test_nan_in_a_nested_column_and_a_column_of_nan(tmp_path):
    rows = [{"prompt": n, "reward_model": {"ground_truth": gold}} for n, gold in ("a1", ("b", NAN))]
    assert [row.prompt for row in load(tmp_path, *rows, missing="skip").rows] == ["a"]
    loaded = load(tmp_path, {"prompt": NAN, "question": "a", "answer": NAN, "solution": "1"})
    assert "prompt <- question, answer <- solution" in loaded.mapping
    assert message(tmp_path, {"prompt": [{"role": "system", "content": NAN}], "answer": "1"}) == (
        ", row 0: a chat message needs text as 'role' and 'content', found str and NoneType"
    )


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_answer_where_others_have_one(tmp_path, empty):
    rows = [FULL, {"prompt": "c", "answer": empty}]
    assert message(tmp_path, *rows) == (
        ", row 1: the answer in column 'answer' is empty: set data.missing: skip to leave such "
        "rows out"
    )
    assert len(load(tmp_path, *rows, missing="skip").rows) == 1
    # Rewards of another domain may need none, and say so with an empty one in every row.
    kinds = [row | {"kind": row["prompt"]} for row in rows]
    assert len(load(tmp_path, *kinds, domain_key="kind").rows) == 2
    assert load(tmp_path, rows[1]).rows[0].answer == empty
