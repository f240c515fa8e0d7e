"""Writes the tables of speed-ups from docs/speedups.yaml, and compares what pages say with it.

    python docs/gen_speedups.py [--check]

A speed-up is a factor over a baseline that is named. Rows of ``simulated`` are written by
``experiments/improvements/run.py``; over plain rounds that grade while they decode. A row of
``measured`` has the seconds of baseline and mode, or the factor itself, and the pages that say it.
Output blocks are not looked into for other numbers, but a row's number may stand in one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("benchmarks", "concepts", "guide", "paper")))
PAGES += ("docs/simulation.md", "docs/emulation.md")
SETTINGS = {"7B/8k": 2.03, "14B/16k": 2.22, "32B/32k": 2.56}
"""The speed-ups that the paper publishes, over its own baseline."""
GPUS = {"7B/8k": 16, "14B/16k": 32, "32B/32k": 64}
LATE = "off, graded after the rollout"
PAPER = "the paper's full system"
SHORT = {
    "exact": "`exact`",
    "prompts, eta 1.125": "`prompts`, 1.125 times the prompts",
    "race": "`race`, 1.25 times of both",
    "partial, eta 1.25": "`partial`, 1.25 times the prompts",
    PAPER: "the paper's full system, simulated",
}
MARK, END = "<!-- speed-ups -->\n", "<!-- end of speed-ups -->\n"
_OTHER_UNIT = re.compile(r"times as fast|faster by|of the wall time")
Rows = Mapping[str, Mapping[str, Mapping[str, float]]]


def shown(row: Mapping[str, float]) -> str:
    """A cell: factor, and kept over true length or the share of stale tokens."""
    more = f"{row['stale']:.0%} stale" if "stale" in row else f"{row['kept']:.2f}"
    return f"{row['factor']:.2f}x / {more}"


def factor(row: Mapping[str, Any]) -> str:
    """Of a measured row."""
    told = row["seconds"][0] / row["seconds"][1] if "seconds" in row else row["factor"]
    return f"{told:.2f}x"


def table(settings: Sequence[str], rows: Rows, arms: Mapping[str, str]) -> list[str]:
    """A row an arm, a column a setting."""
    heads = [f"{name}, {GPUS[name]} GPUs" if name in GPUS else name for name in settings]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(settings)]
    for arm, words in arms.items():
        cells = [shown(rows[name][arm]) if arm in rows[name] else "-" for name in settings]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def blocks(rows: Rows) -> dict[str, str]:
    """What stands between the marks of a page."""
    late, full = (
        [rows[name]["off"]["factor"] / rows[name][LATE]["factor"] for name in SETTINGS],
        [rows[name][PAPER]["factor"] / rows[name][LATE]["factor"] for name in SETTINGS],
    )
    listed = [
        ", ".join(f"{each:.2f}x" for each in some) for some in (late, full, SETTINGS.values())
    ]
    footnote = (
        "The paper's baseline grades after the rollout: over it, plain rounds that grade while\n"
        f"they decode gain {listed[0]} here, and the paper's full system\n"
        f"{listed[1]}; published are {listed[2]}."
    )
    every = {arm: arm for arm in next(iter(rows.values()))}
    return {
        "README.md": "\n".join([*table([*SETTINGS], rows, SHORT), "", footnote]),
        "experiments/improvements/README.md": "\n".join(table([*rows], rows, every)),
    }


def put(page: str, block: str) -> str:
    """A page with this block between its marks."""
    head, _, rest = page.partition(MARK)
    return f"{head}{MARK}\n{block}\n\n{END}{rest.partition(END)[2]}"


def wrong(page: str, text: str, told: Mapping[str, Any]) -> list[str]:
    """What a page lacks of its rows, and says beside them."""
    mine = [row for row in told["measured"] if page in row["pages"]]
    lacks = [f"{factor(row)} ({row['what']})" for row in mine if factor(row) not in text]
    prose = re.sub(r"```.*?```|<!-- speed-ups -->.*?<!-- end", "", text, flags=re.DOTALL)
    known = {factor(row) for row in mine}
    known |= {f"{arms[arm]['factor']:.2f}x" for arms in told["simulated"].values() for arm in arms}
    more = [each for each in re.findall(r"\b\d+\.\d+x\b", prose) if each not in known]
    return [*lacks, *more, *_OTHER_UNIT.findall(prose)]


def main() -> None:
    """Write the tables, or with ``--check`` compare them; then compare the numbers of prose."""
    told = yaml.safe_load((ROOT / "docs" / "speedups.yaml").read_text(encoding="utf-8"))
    for page, block in blocks(told["simulated"]).items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if "--check" not in sys.argv[1:]:
            path.write_text(put(text, block), encoding="utf-8")
        elif put(text, block) != text:
            raise SystemExit(f"{page}: other speed-ups than the rows: python docs/gen_speedups.py")
    for page in PAGES:
        if found := wrong(page, (ROOT / page).read_text(encoding="utf-8"), told):
            raise SystemExit(f"{page}: not as docs/speedups.yaml has it: {', '.join(found)}")


if __name__ == "__main__":
    main()
