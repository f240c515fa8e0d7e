"""Table 2: what each part of RollPacker adds to veRL, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.sim.reproduce.jobs import PAPER_STREAMING, SETTINGS, PaperJob, job, three_domains
from rollpacker.sim.reproduce.rows import ResultRow, row
from rollpacker.sim.world.result import JobResult, mean

TITLE = "Speed-up over veRL, cumulative"
PARTS = ("tail batching", "reward", "parallelism", "trainer")
PAPER = {
    "8k": (1.30, 2.01, 2.01, 2.03),
    "16k": (1.48, 1.99, 2.02, 2.22),
    "32k": (2.21, 2.48, 2.52, 2.56),
}

FITTED = ("tail batching", "reward", "trainer")
"""Parts whose step times the calibration was fitted to."""
_CODE_ONLY = "1.48 is also the paper's ratio for code alone; no costs fit it and the other cells"
_NOTES = {
    "tail batching": "synchronous reward, training costs fitted to step times",
    "reward": "judge latency fitted to step times",
    "parallelism": "the paper's rule never moves: no engine preempts",
    "trainer": "what streaming hides, train_mfu and apply_s, fitted to step times and Table 3",
}


def verl(setting: str) -> PaperJob:
    """The baseline: plain rounds, rewards after them, gradients dealt out in turn."""
    return job(
        setting,
        "off",
        domains=three_domains(),
        reward_phase=True,
        balanced_training=False,
    )


def part(setting: str, name: str) -> PaperJob:
    """RollPacker with all of its parts up to ``name``."""
    reached = PARTS.index(name)
    return job(
        setting,
        "race",
        domains=three_domains(),
        reward_phase=reached < 1,
        planner="paper" if reached >= 2 else "off",
        balanced_training=reached >= 3,
        streaming=PAPER_STREAMING if reached >= 3 else None,
    )


def jobs() -> dict[str, PaperJob]:
    """By setting and part."""
    found = {f"{s}/veRL": verl(s) for s in SETTINGS}
    return found | {f"{s}/{name}": part(s, name) for s in SETTINGS for name in PARTS}


def step_s(results: Sequence[JobResult]) -> float:
    """Mean seconds of a step over jobs."""
    return mean(result.mean_step_s for result in results)


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Twelve cells."""
    found: list[ResultRow] = []
    for setting, values in PAPER.items():
        base = step_s(results[f"{setting}/veRL"])
        for name, paper in zip(PARTS, values, strict=True):
            ours = base / step_s(results[f"{setting}/{name}"])
            fitted = name in FITTED
            note = _CODE_ONLY if (setting, name) == ("16k", "tail batching") else ""
            label = f"table2/{setting}/+{name}"
            found.append(row(label, paper, ours, fitted=fitted, note=note or _NOTES[name]))
    return found
