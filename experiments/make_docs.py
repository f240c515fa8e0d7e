"""Writes docs/reproduction.md and one folder per figure from ``rollpacker reproduce all``.

    python experiments/make_docs.py [--seeds N] [--sides]

Every row is written, missed ones too. ``--sides`` simulates nothing and writes only what the
pages say of the runs on a CPU and on GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from xml.sax.saxutils import escape

import yaml
from cpu_runs import Experiment, experiments

from rollpacker.cli.simulate.reproduce import reproduce_rows
from rollpacker.sim.reproduce import FIGURES, ResultRow, within

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reproduction.md"
HEAD = """# Reproducing the paper

`rollpacker reproduce all` simulates the experiments of [RollPacker](https://arxiv.org/abs/2509.21009)
with the policies of a real run on cost models, `rollpacker reproduce fig9` one of them.

- **predicted**: no cost or length was fitted to this value.
- **fitted**: a constant of `src/rollpacker/sim/calibration/*.yaml`, or one that the row's note
  names, was fitted to it, alone or with others; agreement shows consistency, not foresight.
- **not reproduced**: ours is more than 10% away from the paper, or the simulator has no answer.

Length distributions were fitted to the paper's figures too. Rows without a value of the paper's are
ours alone.
"""
FOOT = "\n*This page is generated from a run by `experiments/make_docs.py`.*\n"
REAL = "## For real\n"
"""Starts what is said of the other two sides of an experiment."""
REAL_HEAD = """
The artifact's own experiments also run for real: small on a CPU, with the demo's model, by
`python experiments/run_cpu.py`, and as configurations for GPUs that nobody has run yet
(`experiments/README.md` says what a GPU run still needs). What the CPU runs show:
"""
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
    parser.add_argument("--sides", action="store_true")
    given = parser.parse_args()
    if not given.sides:
        simulate(given.seeds)
    write_sides()


def simulate(seeds: int) -> None:
    """Simulate all figures and write their pages."""
    began = time.perf_counter()
    rows = reproduce_rows(list(FIGURES), seeds)
    wall = time.perf_counter() - began
    by_figure = {
        name: [row for row in rows if row.name.split("/")[0].startswith(name)] for name in FIGURES
    }
    for name, found in by_figure.items():
        write_folder(name, found)
    PAGE.write_text(page(by_figure, seeds, wall), encoding="utf-8")


def write_sides() -> None:
    """Put what there is for real at the end of each page, in place of what is there."""
    known = experiments()
    put(PAGE, "\n".join([REAL_HEAD, *overview(known)]) + FOOT)
    for name, experiment in known.items():
        readme = HERE / name / "README.md"
        if name not in FIGURES:
            readme.write_text(
                f"# {experiment.title}\n\nNot simulated: costs do not learn.\n", encoding="utf-8"
            )
        put(readme, "\n".join(["", *sides(experiment), ""]))


def put(path: Path, text: str) -> None:
    """Write ``text`` as the last section of a page."""
    head = path.read_text(encoding="utf-8").split(REAL)[0].removesuffix(FOOT)
    path.write_text(f"{head.rstrip()}\n\n{REAL}{text}", encoding="utf-8")


def overview(known: Mapping[str, Experiment]) -> list[str]:
    """Where each figure's runs on a CPU are told."""
    lines = [
        f"| {experiment.title} | `experiments/{name}/cpu.md` |"
        for name, experiment in known.items()
    ]
    return ["| | |", "|---|---|", *lines, ""]


def sides(experiment: Experiment) -> list[str]:
    """What a figure's folder has besides the simulation."""
    runs = experiment.runs or experiment.name
    at = "" if runs == experiment.name else f"../{runs}/"
    gpu = sorted(path.name for path in (HERE / runs).glob("gpu*.yaml"))
    return [
        f"- On a CPU: [measured](cpu.md) by `python experiments/run_cpu.py {runs}`, from "
        f"[cpu.yaml]({at}cpu.yaml) and the overrides of [arms.yaml]({at}arms.yaml).",
        f"- On GPUs, not run yet: {', '.join(f'[{name}]({at}{name})' for name in gpu)} and the "
        "same overrides.",
    ]


def page(by_figure: dict[str, list[ResultRow]], seeds: int, wall: float) -> str:
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
    return "\n".join([*lines, ""])


def table(rows: Sequence[ResultRow]) -> list[str]:
    """Rows as a Markdown table; a note of several rows stands once, below it."""
    counts = Counter(row.note for row in rows if row.note)
    shared = [note for note, count in counts.items() if 1 < count < len(rows)]
    letters = dict(zip(shared, ascii_lowercase, strict=False))
    every = [note for note, count in counts.items() if count == len(rows) > 1]
    marks = letters | dict.fromkeys(every, "")
    notes = [marks.get(row.note, row.note) for row in rows]
    lines = ["| | paper | ours | error | status |", "|---|--:|--:|--:|---|"]
    if any(notes):
        lines = [f"{lines[0]} note |", f"{lines[1]}---|"]
    for row, note in zip(rows, notes, strict=True):
        error = "" if row.relative_error is None else f"{row.relative_error:+.0%}"
        name = row.name.split("/", 1)[1]
        status = row.status.replace("_", " ")
        cells = [name, number(row.paper), number(row.ours), error, status]
        lines.append(f"| {' | '.join(cells + [note] * any(notes))} |")
    below = [f"- **{letter}**: {note}" for note, letter in letters.items()]
    below += [f"- all rows: {note}" for note in every]
    return [*lines, "", *below] if below else lines


def number(value: float | None) -> str:
    """Three digits that count."""
    return "" if value is None else f"{value:.3g}"


def write_folder(name: str, rows: Sequence[ResultRow]) -> None:
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


def plot(rows: Sequence[ResultRow]) -> str:
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
