"""Write one self-contained HTML page: template, style, script and plotly are inlined once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise ImportError(
        f"the report needs jinja2 and plotly ({error}): pip install 'rollpacker[report]'"
    ) from error

from rollpacker.core.codec import dumps_finite


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline number with its name and a short note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows of text under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Args:
        id: anchor and name of its data in the page.
        figure: plotly ``data`` and ``layout``.
        gantt: charts for the script (``charts``, ``marked``, ``shown``, ``select``).
        browser: responses for the script to search (``rows``, ``prompts``, ``kinds``, ``rewards``).
        code: shown unchanged, folded.
    """

    id: str
    title: str
    text: str
    _: KW_ONLY
    figure: Mapping[str, Any] | None = None
    gantt: Mapping[str, Any] | None = None
    table: Grid | None = None
    browser: Mapping[str, Any] | None = None
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page. ``facts`` are its unrounded numbers for scripts, ``links`` relative addresses by
    name."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    links: Mapping[str, str] = field(default_factory=dict[str, str])


def write_page(page: Page, path: Path) -> Path:
    """Render and write ``path`` at once, and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "facts": page.facts,
        "figures": {s.id: s.figure for s in page.sections if s.figure is not None},
        "browsers": {s.id: s.browser for s in page.sections if s.browser is not None},
        "gantts": {s.id: s.gantt for s in page.sections if s.gantt is not None},
    }
    html = _template().render(page=page, data=Markup(embed(data)), plotly=Markup(get_plotlyjs()))
    partial = path.with_name(path.name + ".part")
    partial.write_text(html, encoding="utf-8")
    partial.replace(path)
    return path


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("rollpacker.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def embed(data: Any) -> str:
    """Return JSON that is safe inside a script element. Infinities and NaN become null."""
    text = dumps_finite(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def seconds(value: float | None) -> str:
    """``0.84 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if value is None:
        return "–"
    if value < 0.0995:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def share(value: float | None) -> str:
    """``13.2%``."""
    return "–" if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    """``12,345``, and ``1.2 M`` from a million on."""
    if value is None:
        return "–"
    return f"{value / 1e6:.3g} M" if abs(value) >= 1e6 else f"{value:,.0f}"


def plain(value: float | None) -> str:
    """Three decimals."""
    return "–" if value is None else f"{value:.3f}"
