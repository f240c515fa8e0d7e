"""Writes docs/reproduction.md and one folder per figure from ``rollpacker reproduce all``.

    python experiments/make_docs.py [--seeds N]

Every row is written, missed ones too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import yaml

from rollpacker.cli.reproduce import reproduce_rows
from rollpacker.sim.reproduce import FIGURES
from rollpacker.sim.reproduce.rows import Row, within

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reproduction.md"
HEAD = """# Reproducing the paper

`rollpacker reproduce all` simulates the experiments of
[RollPacker](https://arxiv.org/abs/2509.21009): the policies are the ones that a real run uses,
the machines are cost models (`src/rollpacker/sim`). Each row says how it came about:

- **predicted**: no cost or length was fitted to this value.
- **fitted**: a constant of `src/rollpacker/sim/calibration/*.yaml`, or one that the row's note
  names, was fitted to it, alone or with others; agreement shows consistency, not foresight.
- **not reproduced**: ours is more than 10% away from the paper, or the simulator has no answer.

The length distributions were fitted to the paper's figures too, and the paper's runs disagree
among themselves (one 14B setting needs decode steps 0.9 to 1.2 times as long in different
figures). Figure 11 is a fit with choices made after seeing its bars; its last rows say what either
aggregation reaches alone. Rows without a value of the paper's are ours alone.
"""
FOOT = "\n*This page is generated from a run by `experiments/make_docs.py`.*\n"
COLOURS = {
    "paper": "#9aa5b1",
    "predicted": "#2b8a3e",
    "fitted": "#1c7ed6",
    "not_reproduced": "#e03131",
}


def main() -> None:
    """Simulate everything and write it down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    began = time.perf_counter()
    rows = reproduce_rows(list(FIGURES), seeds)
    wall = time.perf_counter() - began
    by_figure = {
        name: [row for row in rows if row.name.split("/")[0].startswith(name)] for name in FIGURES
    }
    for name, found in by_figure.items():
        write_folder(name, found)
    PAGE.write_text(page(by_figure, seeds, wall), encoding="utf-8")


def page(by_figure: dict[str, list[Row]], seeds: int, wall: float) -> str:
    """The whole documentation page."""
    every = [row for found in by_figure.values() for row in found]
    compared = sum(row.paper is not None for row in every)
    lines = [
        HEAD,
        f"{within(every)} of {compared} values are within 10% of the paper's, over {seeds} seeds, "
        f"simulated in {wall:.0f} s.",
        "",
    ]
    for name, found in by_figure.items():
        compared = sum(row.paper is not None for row in found)
        lines += [
            f"## {FIGURES[name].title} (`{name}`)",
            "",
            f"{within(found)} of {compared} within 10%.",
            "",
            *table(found),
            "",
        ]
    return "\n".join(lines) + FOOT


def table(rows: Sequence[Row]) -> list[str]:
    """Rows as a Markdown table."""
    lines = ["| | paper | ours | error | status | |", "|---|--:|--:|--:|---|---|"]
    for row in rows:
        error = "" if row.relative_error is None else f"{row.relative_error:+.0%}"
        name = row.name.split("/", 1)[1]
        status = row.status.replace("_", " ")
        cells = (name, number(row.paper), number(row.ours), error, status, row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float | None) -> str:
    """Three digits that count."""
    return "" if value is None else f"{value:.3g}"


def write_folder(name: str, rows: Sequence[Row]) -> None:
    """README, plot and the configuration of one simulated job."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    figure = FIGURES[name]
    label, job = list(figure.jobs().items())[-1]
    text = [
        f"# {figure.title}",
        "",
        "```bash",
        f"rollpacker reproduce {name}",
        "```",
        "",
        f"`config.yaml` is one of its jobs (`{label}`): `rollpacker simulate config.yaml`.",
        "",
        "![ours beside the paper's](plot.svg)",
        "",
        *table(rows),
        "",
        "*Generated from a run by `experiments/make_docs.py`.*",
        "",
    ]
    (folder / "README.md").write_text("\n".join(text), encoding="utf-8")
    config = yaml.safe_dump(job.config, sort_keys=False)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "plot.svg").write_text(plot(rows), encoding="utf-8")


def plot(rows: Sequence[Row]) -> str:
    """Bars of the paper's values and ours, on one scale."""
    top = max((v for row in rows for v in (row.paper, row.ours) if v is not None), default=1.0)
    height = 34 * len(rows) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, row in enumerate(rows):
        y = 10 + 34 * place
        parts.append(f'<text x="8" y="{y + 18}">{escape(row.name.split("/", 1)[1])}</text>')
        for offset, value, colour in (
            (0, row.paper, COLOURS["paper"]),
            (14, row.ours, COLOURS[row.status]),
        ):
            if value is None:
                continue
            width = 460 * value / top
            parts.append(
                f'<rect x="300" y="{y + offset}" width="{width:.1f}" height="12" fill="{colour}"/>'
                f'<text x="{306 + width:.1f}" y="{y + offset + 10}">{number(value)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
