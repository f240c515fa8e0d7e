"""Rows of docs/speedups.yaml, and what is found where a page says others."""

import importlib.util
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("gen", DOCS / "gen.py")
assert spec is not None
gen = importlib.util.module_from_spec(spec)
assert spec.loader is not None
spec.loader.exec_module(gen)
TOLD = yaml.safe_load((DOCS / "speedups.yaml").read_text(encoding="utf-8"))
ROW = {"what": "a job", "mode": "exact", "over": "off", "seconds": [3.0, 2.0], "pages": ["a.md"]}


def test_every_row_names_its_baseline_its_command_and_its_pages() -> None:
    for row in TOLD["measured"]:
        assert row["over"], row
        assert row["command"], row
        assert {*row["pages"]} <= {*gen.PAGES}, row
        assert ("seconds" in row) != ("factor" in row), row


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gains 1.50x", []),
        ("gains 1.51x", ["1.50x (a job)", "1.51x"]),
        ("gains 1.50x, then 1.60x", ["1.60x"]),
        ("is 1.50x, 1.5 times as fast", ["times as fast"]),
        ("```\nan output of 9.99x\n```\n1.50x", []),
    ],
)
def test_another_number_or_unit_is_found(text: str, found: list[str]) -> None:
    assert gen.wrong("a.md", text, {"measured": [ROW], "simulated": {}}) == found
