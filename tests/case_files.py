"""Tables of tests that have many rows: ``cases/<test>.json`` beside the test holds them by name."""

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _tables(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_table(test: str, name: str) -> Any:
    """The table ``name`` of the test file ``test``."""
    path = Path(test)
    return _tables((path.parent / "cases" / path.name).with_suffix(".json"))[name]
