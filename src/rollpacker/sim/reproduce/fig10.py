"""Figure 10c: seconds of a step in short and in long rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.core.types import RoundKind
from rollpacker.sim.reproduce.jobs import SETTINGS, PaperJob
from rollpacker.sim.reproduce.rows import ResultRow, row
from rollpacker.sim.reproduce.table2 import part
from rollpacker.sim.world.result import JobResult, mean

TITLE = "Seconds of a step in short and long rounds"
PAPER = {"8k": (106.0, 129.0), "16k": (134.0, 302.0), "32k": (261.0, 771.0)}
_KINDS = (RoundKind.SHORT, RoundKind.LONG)


def jobs() -> dict[str, PaperJob]:
    """The whole of RollPacker."""
    return {setting: part(setting, "trainer") for setting in SETTINGS}


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Short and long rounds of each setting."""
    found: list[ResultRow] = []
    for setting, values in PAPER.items():
        for kind, paper in zip(_KINDS, values, strict=True):
            ours = mean(s.step_s for r in results[setting] for s in r.of(kind))
            note = "costs fitted to these step times and to Table 2 together"
            found.append(row(f"fig10c/{setting}/{kind.value}", paper, ours, fitted=True, note=note))
    return found
