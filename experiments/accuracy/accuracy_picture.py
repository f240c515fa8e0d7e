"""Picture of the study: how far each arm is from plain rounds, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from accuracy_tables import Arms, Value, difference, last, plain_of, whole

LEFT, PANEL, GAP, ROW, HEAD, FOOT = 210, 170, 18, 28, 34, 34
MOST = 0.06
"""Of a difference that has a place; what is further away is written at the edge."""
POINT, LINE, TEXT, PALE = "#1c7ed6", "#9aa5b1", "#1f2733", "#d5dbe2"


def picture(found: Mapping[tuple[str, float], Arms]) -> str:
    """A panel for each task and learning rate, a row for each arm, as an SVG."""
    names = [*dict.fromkeys(arm for arms in found.values() for arm in arms if arm != "off")]
    width = LEFT + len(found) * (PANEL + GAP)
    height = HEAD + ROW * len(names) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(_text(LEFT - 12, _y(row), name, "end") for row, name in enumerate(names)),
    ]
    for column, ((task, rate), arms) in enumerate(found.items()):
        left = LEFT + column * (PANEL + GAP)
        parts += _panel(left, f"{task}, {rate:g}", len(names))
        for row, name in enumerate(names):
            if name in arms:
                parts += _point(left, _y(row) - 5, arms, name, whole, POINT)
                parts += _point(left, _y(row) + 6, arms, name, last, "#ffffff")
    words = (
        "accuracy less that of plain rounds (exact: less off), 95% intervals over seeds; filled: "
        "mean of ten evaluations, hollow: at the end"
    )
    return "\n".join([*parts, _text(LEFT, height - 4, words), "</svg>\n"])


def _y(row: int) -> float:
    return HEAD + ROW * (row + 0.5)


def _x(left: float, value: float) -> float:
    return left + PANEL * (0.5 + max(-1.0, min(value / MOST, 1.0)) / 2)


def _panel(left: float, title: str, rows: int) -> Iterator[str]:
    yield _text(left + PANEL / 2, HEAD - 14, title, "middle")
    for value in (-0.05, 0.0, 0.05):
        x, end = _x(left, value), HEAD + ROW * rows
        yield f'<path d="M{x:.1f} {HEAD}V{end}" stroke="{LINE if not value else PALE}"/>'
        yield _text(x, end + 12, f"{value:+.2f}" if value else "0", "middle", 10)


def _point(left: float, y: float, arms: Arms, arm: str, value: Value, fill: str) -> Iterator[str]:
    found = difference(arms[arm], plain_of(arms, arm), value)
    if found is None:
        return
    mean, half = found.mean, found.half
    if abs(mean) > MOST:
        words, anchor = (f"← {mean:+.2f}", "start") if mean < 0 else (f"{mean:+.2f} →", "end")
        yield _text(_x(left, mean), y, words, anchor, 11)
        return
    if not math.isnan(half):
        low, high = _x(left, mean - half), _x(left, mean + half)
        yield f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{POINT}" stroke-width="2"/>'
    place = f'cx="{_x(left, mean):.1f}" cy="{y}" r="4"'
    yield f'<circle {place} fill="{fill}" stroke="{POINT}" stroke-width="2"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    more = f'text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {more} dominant-baseline="middle">{escape(words)}</text>'
