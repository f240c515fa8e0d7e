"""Picture of one step in several modes: what each device does, as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollpacker.report.drawing.gantt_data import STATES, Gantt

TITLES = {
    "off": "off: everybody waits for the last response",
    "exact": "exact: nothing is discarded; rewards and gradients do not wait for the tail",
    "race": "race, a short round: the first to finish are kept, the others wait for a long round",
}
COLOURS = {
    "kept responses": "#3f7fc1",
    "aborted responses": "#d97f2e",
    "gradients": "#4a9d72",
    "update": "#8660a8",
    "new weights": "#b9bfc9",
    "idle": "#f7e8cb",
}
KEPT, ABORTED, GRADIENTS, UPDATE, WEIGHTS, IDLE = COLOURS.values()
FEW = "#dfeaf6"
"""Behind the responses: a device that decodes few of them is not idle, and hardly used."""
WIDTH, LEFT, ROW, HEAD, FOOT = 900, 64, 9, 34, 26
SCALE = WIDTH - LEFT - 64
"""Pixels of the longest step, whose seconds are told behind it."""


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    """With its corner at the top left."""
    return f'<path fill="{fill}" d="{outline(x, y, width, height)}"/>'


def outline(x: float, y: float, width: float, height: float) -> str:
    """Of a rectangle, in the words of a path."""
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def text(x: float, y: float, words: str, size: int = 12, more: str = "") -> str:
    """On a line at ``y``."""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="#1f2733"{more}>{words}</text>'


def running(worker: Mapping[str, Any], pixel_s: float, aborted: bool) -> np.ndarray:
    """Responses that a worker decodes, for each pixel of the step."""
    edges = np.zeros(SCALE + 2)
    for _, start, end, state, *_ in worker["attempts"]:
        if (STATES[state] == "aborted") == aborted:
            edges[min(int(start / pixel_s), SCALE)] += 1
            edges[min(int(end / pixel_s) + 1, SCALE + 1)] -= 1
    return np.cumsum(edges)[:SCALE]


def steps(low: np.ndarray, high: np.ndarray, y: float, fill: str) -> str:
    """What lies between two curves of heights."""
    changed = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
    changes: list[int] = changed.tolist()
    bars = [
        outline(LEFT + a, y + ROW - high[a], b - a, high[a] - low[a])
        for a, b in zip([0, *changes], [*changes, len(low)], strict=True)
        if high[a] > low[a]
    ]
    return f'<path fill="{fill}" d="{"".join(bars)}"/>'


def row(worker: Mapping[str, Any], y: float, pixel_s: float, most: int) -> Iterator[str]:
    """One device."""
    updated = max((end for *_, end, _, _ in worker["tasks"]), default=0.0)
    last = max((end for _, _, end, *_ in worker["attempts"]), default=0.0)
    yield rectangle(LEFT, y, last / pixel_s, ROW, FEW)
    for start, end in worker["idle"]:
        fill = WEIGHTS if start >= updated else IDLE
        yield rectangle(LEFT + start / pixel_s, y, (end - start) / pixel_s, ROW, fill)
    unit = (ROW - 1) / most
    kept = unit * running(worker, pixel_s, aborted=False)
    aborted = unit * running(worker, pixel_s, aborted=True)
    yield steps(np.zeros_like(kept), kept, y, KEPT)
    yield steps(kept, kept + aborted, y, ABORTED)
    for _, start, end, kind, _ in worker["tasks"]:
        fill = GRADIENTS if kind == "accumulate" else UPDATE
        yield rectangle(LEFT + start / pixel_s, y, (end - start) / pixel_s, ROW - 1, fill)


def panel(mode: str, chart: Mapping[str, Any], y: float, pixel_s: float) -> Iterator[str]:
    """One step."""
    workers = chart["workers"]
    yield text(LEFT, y + 12, TITLES[mode], 13, ' font-weight="bold"')
    most = max(worker["lanes"] for worker in workers)
    for number, worker in enumerate(workers):
        yield from row(worker, y + 20 + number * ROW, pixel_s, most)
    bottom = y + 20 + len(workers) * ROW
    yield text(8, y + 20 + 12, "device 0", 11)
    yield text(8, bottom - 2, f"device {len(workers) - 1}", 11)
    end = LEFT + chart["end"] / pixel_s
    yield f'<path d="M{end:.1f} {y + 20} V{bottom}" stroke="#1f2733" stroke-width="1.5"/>'
    yield text(end + 6, bottom - 6, f"{chart['end']:.0f} s", 13, ' font-weight="bold"')


def step_picture(gantts: Mapping[str, Gantt]) -> str:
    """The last step of each mode's run, on one time axis; of ``off``, ``exact`` and ``race``."""
    charts = {mode: gantt.chart(max(gantt.windows)) for mode, gantt in gantts.items()}
    pixel_s = max(chart["end"] for chart in charts.values()) / SCALE
    devices = max(len(chart["workers"]) for chart in charts.values())
    height = 20 + ROW * devices
    whole = HEAD + len(charts) * (height + 18) + FOOT - 18
    size = f'viewBox="0 0 {WIDTH} {whole}" width="{WIDTH}" height="{whole}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img" '
        f'aria-label="One step of {devices} devices in the modes {", ".join(charts)}">',
        rectangle(0, 0, WIDTH, whole, "#ffffff"),
    ]
    at = LEFT
    for name, colour in COLOURS.items():
        parts += [rectangle(at, 10, 11, 11, colour), text(at + 16, 20, name)]
        at += 36 + round(6.6 * len(name))
    for number, (mode, chart) in enumerate(charts.items()):
        parts += panel(mode, chart, HEAD + number * (height + 18), pixel_s)
    return "\n".join([*parts, "</svg>", ""])
