"""Tables give each row the columns of all: what a row lacks is no test and no setting of it."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars
import pytest

from rollpacker.config import DataConfig
from rollpacker.data.load import load_rows
from rollpacker.sandbox import float_tolerance, read_tests

ASSERTS = ["assert f(1) == 2"]
PAIRS = {"inputs": ["1\n"], "outputs": ["2\n"]}
LAYOUTS: list[dict[str, Any]] = [
    {"test_list": ASSERTS, "test_imports": ["import math"]},
    {"input_output": PAIRS, "float_tolerance": 0.25},
    {"input_output": {"inputs": [[1]], "outputs": [2]}, "fn_name": "f"},
    {"unit_tests": ASSERTS},
    {"test": "assert f(1) == 2", "entry_point": "f"},
    {"tests": [{"input": "1\n", "output": "2\n"}]},
]


def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "answer": "", **row} for n, row in enumerate(LAYOUTS)]


def columns(path: str) -> list[dict[str, Any]]:
    return [dict(row.columns) for row in load_rows(DataConfig(path=path)).rows]


def check(found: list[dict[str, Any]]) -> None:
    for row, alone in zip(found, rows(), strict=True):
        assert {k: v for k, v in row.items() if v is not None} == alone
        assert read_tests(row) == read_tests(alone)
        assert float_tolerance(row) == alone.get("float_tolerance")


def test_a_table_of_pandas_with_rows_of_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    module = ModuleType("cells_of_the_test")
    vars(module)["rows"] = lambda: pandas.DataFrame(rows())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check(columns(f"{module.__name__}:rows"))


@pytest.mark.parametrize("missing", ["NaT", "NA"])
def test_what_else_pandas_has_for_nothing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    pandas = pytest.importorskip("pandas")
    module = ModuleType("cells_of_the_test")
    names = ("test_imports", "fn_name", "float_tolerance")
    nothing = dict.fromkeys(names, getattr(pandas, missing))
    vars(module)["rows"] = lambda: [nothing | row for row in rows()]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check(columns(f"{module.__name__}:rows"))


def test_files_hold_nan_for_what_is_missing(tmp_path: Path) -> None:
    frame = polars.DataFrame(
        {
            "prompt": ["a", "b"],
            "answer": ["1", "2"],
            "test_list": [ASSERTS, ASSERTS],
            "float_tolerance": [0.25, float("nan")],
        }
    )
    frame.write_parquet(tmp_path / "a.parquet")
    row = '{"prompt": "a", "answer": "1", "test_list": ["assert f(1) == 2"], "float_tolerance": '
    (tmp_path / "a.jsonl").write_text(f"{row}0.25}}\n{row}NaN}}\n", encoding="utf-8")
    for name in ("a.parquet", "a.jsonl"):
        found = columns(str(tmp_path / name))
        assert [float_tolerance(each) for each in found] == [0.25, None]
