"""Table 3: when the stream trainer takes devices, without tail batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.sim.reproduce.jobs import PAPER_STREAMING, PaperJob, Tree, job
from rollpacker.sim.reproduce.rows import ResultRow, row
from rollpacker.sim.reproduce.table2 import step_s
from rollpacker.sim.world.result import JobResult

TITLE = "Seconds of a step by the stream trainer's rule, 7B/8k"
PAPER = {"none": 124.2, "fixed 20%": 122.7, "fixed 30%": 118.2, "fixed 40%": 119.8}
ADAPTIVE = 115.2
_FITTED = "train_mfu and apply_s of 7B/8k were fitted to none and adaptive"


def streamed(streaming: Tree | None) -> PaperJob:
    """Full rounds without a judge; gradients are dealt out in turn when none are streamed."""
    plain = streaming is None
    mode = "off" if plain else "exact"
    return job(
        "8k",
        mode,
        streaming=streaming,
        steps=10,
        asynchronous_grading=True,
        balanced_training=not plain,
    )


def jobs() -> dict[str, PaperJob]:
    """By rule."""
    found = {"none": streamed(None), "adaptive": streamed(PAPER_STREAMING)}
    fixed: Tree = {"group_tokens": 16384, "scaling": "fixed"}
    for percent in (20, 30, 40):
        found[f"fixed {percent}%"] = streamed(fixed | {"scaling_fraction": percent / 100})
    return found


def rows(results: Mapping[str, Sequence[JobResult]]) -> list[ResultRow]:
    """Seconds of a step, and the speed-up of the adaptive rule."""
    seconds = {name: step_s(many) for name, many in results.items()}
    found = [
        row(
            f"table3/{name}",
            paper,
            seconds[name],
            fitted=name == "none",
            note=_FITTED if name == "none" else "",
        )
        for name, paper in PAPER.items()
    ]
    found.append(row("table3/adaptive", ADAPTIVE, seconds["adaptive"], fitted=True, note=_FITTED))
    speedup = seconds["none"] / seconds["adaptive"]
    return [*found, row("table3/adaptive over none", 1.08, speedup, fitted=True, note=_FITTED)]
