"""Largest differences go to ``results.json``, which docs/gen.py renders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "results.json"
Record = Callable[[str, str, str, float, float], None]


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """``record(peer, case, call, gradient, advantages)``: the largest differences, to one digit."""
    found: dict[str, dict[str, dict[str, str]]] = {}

    def add(peer: str, case: str, call: str, gradient: float, advantages: float) -> None:
        rows = found.setdefault(peer, {})
        rows[case] = {
            "call": call,
            "gradient": f"{gradient:.0e}",
            "advantages": f"{advantages:.0e}",
        }

    yield add
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for peer, rows in found.items():
        results[peer] = {"version": version(peer), "cases": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
