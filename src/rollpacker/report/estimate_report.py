"""The page of an estimate: the predicted gain of each mode of tail batching."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rollpacker.report.drawing import page
from rollpacker.report.drawing.page import Grid, Page, Section, Tile, count, seconds
from rollpacker.sim.estimate import Estimate

_HEADER = (
    "mode",
    "speed-up",
    "range",
    "kept/true length",
    "step",
    "decoded/kept tokens",
    "stale tokens",
)


def write_estimate_report(found: Estimate, out: Path) -> Path:
    """Write one self-contained HTML page, and return its path."""
    return page.write_page(_page(found), out)


def _page(found: Estimate) -> Page:
    best = found.modes[found.recommended]
    icc = "unknown" if found.icc is None else f"{found.icc:.2f}"
    return Page(
        title=f"Estimate: {found.task}",
        subtitle=(
            f"{found.prompts} prompts of {found.responses} responses per step, {found.jobs} jobs "
            f"of {found.steps} steps simulated for each mode"
        ),
        tiles=[
            Tile("Recommended", found.recommended, best.range),
            Tile("Kept/true length", f"{best.kept_vs_true_len:.2f}"),
            Tile("Correlation", icc, "of length within a prompt"),
            Tile("Responses read", count(found.read)),
        ],
        sections=[
            Section(
                "modes",
                "Modes",
                " ".join(found.sentences),
                figure=_figure(found),
                table=_table(found),
            ),
            Section(
                "costs",
                "Costs",
                "The assumed machines.",
                table=Grid(header=("costs", ""), rows=list(found.costs.items())),
            ),
        ],
        facts=asdict(found),
    )


def _table(found: Estimate) -> Grid:
    rows = [
        (
            name,
            f"{mode.speedup:.2f}x",
            mode.range,
            f"{mode.kept_vs_true_len:.2f}",
            seconds(mode.step_s),
            f"{mode.decoded_vs_kept:.2f}",
            f"{mode.stale:.0%}",
        )
        for name, mode in found.modes.items()
    ]
    return Grid(header=_HEADER, rows=rows)


def _figure(found: Estimate) -> dict[str, object]:
    names, modes = list(found.modes), found.modes.values()
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [mode.kept_vs_true_len for mode in modes],
                "y": [mode.speedup for mode in modes],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [mode.high - mode.speedup for mode in modes],
                    "arrayminus": [mode.speedup - mode.low for mode in modes],
                },
                "text": names,
                "textposition": "top center",
                "marker": {"size": 12},
                "hovertemplate": "%{text}: %{y:.2f}x, keeps %{x:.2f}<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "kept / true mean length"}},
            "yaxis": {"title": {"text": "speed-up over off"}, "rangemode": "tozero"},
        },
    }
