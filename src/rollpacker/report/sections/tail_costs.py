"""What a run paid for its tail: tokens that no update saw, and tokens of earlier weights."""

from __future__ import annotations

from typing import Any

import polars as pl

from rollpacker.report.drawing import figures
from rollpacker.report.drawing.figures import present
from rollpacker.report.drawing.page import Section, Tile, count, share
from rollpacker.report.reading.run_folder import RunFolder


def stale_tiles(run: RunFolder) -> list[Tile]:
    """What mode ``partial`` has in the place of a length bias; nothing in other modes."""
    names = ("partial/stale_tokens", "partial/stale_tokens_of_longest")
    means = [present(run.metrics, name) for name in names]
    if not all(means):
        return []
    every, longest = (share(sum(values) / len(values)) for values in means)
    return [Tile("Stale tokens", every, f"of earlier weights; {longest} of the longest tenth")]


def aborted_section(lost: pl.DataFrame, facts: dict[str, Any]) -> Section:
    """Tokens that were generated and thrown away."""
    title = "What was thrown away"
    if facts["lost_tokens"] == 0:
        return Section(
            "aborted", title, "Nothing: every generated token was trained on, or waits to be."
        )
    text = (
        f"{count(facts['lost_tokens'])} generated tokens ({share(facts['lost_share'])}) reached "
        "no update. Short rounds abort the responses that lose the race, long rounds re-run them "
        "and abort nothing: high bars without lower step times mean that racing does not pay here."
    )
    return Section("aborted", title, text, figure=figures.aborted(lost))
