"""What docs/compatibility.md shows is of every case, and within the limit (needs no peer)."""

from __future__ import annotations

import json
from pathlib import Path

from peer_case import LIMIT
from peer_options import TRL_CASES, VERL_CASES


def test_every_case_was_measured_and_is_within_the_limit() -> None:
    results = json.loads((Path(__file__).parent / "results.json").read_text())
    for peer, cases in (("trl", TRL_CASES), ("verl", VERL_CASES)):
        rows = results[peer]["cases"]
        assert list(rows) == [case.name for case in cases]
        assert all(float(row["gradient"]) <= LIMIT for row in rows.values())
