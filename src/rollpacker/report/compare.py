"""The report of several runs that differ in their tail-batching mode: the demo's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os.path import relpath
from pathlib import Path
from typing import Any

from rollpacker.report.drawing import figures, page
from rollpacker.report.drawing.figures import MODES, Figure, number
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.drawing.page import (
    Grid,
    Page,
    Section,
    Tile,
    count,
    plain,
    seconds,
    share,
)
from rollpacker.report.reading.run_folder import ReportError, RunFolder, load_run
from rollpacker.report.run_report import run_facts

BASELINE = "off"
NOISY = 0.15  # times are noise if others take at least this share of the cores
EARLY_STEP = 1
"""The step whose charts are compared. It is early, because the modes' weights then hardly
differ. It is not the first, which also warms caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    name: str
    run: RunFolder
    result: Mapping[str, Any]
    gantt: Gantt

    def measured(self) -> dict[str, Any]:
        facts = run_facts(self.run, self.gantt, None, figures.lost_tokens(self.run.samples))
        return {"step_s": facts["mean_step_s"], "rollout_bubble": facts["rollout_bubble"]}


def write_comparison(runs: Mapping[str, Path], summary: Mapping[str, Any], out: Path) -> Path:
    """Write a self-contained page that compares modes.

    Args:
        runs: the run folder of each mode. ``off`` must be among them.
        summary: ``before`` (accuracies before training), ``modes`` (results by mode), ``speedup``
            (``wall``, ``decode_steps``), ``recommended_mode`` and, if known, ``cluster`` (the
            result of ``demo.cluster.run_cluster``, shown only if every emulation kept up).

    Raises ``ReportError`` (a ``ValueError``) with one line if a run cannot be read or the summary
    lacks a mode.
    """
    lacking = [name for name in (BASELINE, *runs) if name not in summary.get("modes", {})]
    if lacking or BASELINE not in runs:
        raise ReportError(f"{out}: no results of mode '{(lacking or [BASELINE])[0]}' to compare")
    names = [BASELINE, *(name for name in runs if name != BASELINE)]
    loaded = {name: load_run(runs[name]) for name in names}
    modes = [
        _Mode(name=name, run=run, result=summary["modes"][name], gantt=Gantt(run))
        for name, run in loaded.items()
    ]
    links = {
        f"report of {name}": relpath(runs[name] / "report.html", out.parent)
        for name in names
        if (runs[name] / "report.html").exists()
    }
    return page.write_page(replace(_page(modes, summary), links=links), out)


def emulated_step(cluster: Mapping[str, Mapping[str, Any]]) -> Section:
    """Show the last step of runs on emulated devices, by mode (``run``: the folder)."""
    gantts = {mode: Gantt(load_run(Path(each["run"]))) for mode, each in cluster.items()}
    charts = [gantt.chart(max(gantt.windows)) | {"name": mode} for mode, gantt in gantts.items()]
    text = (
        "In off, many GPUs wait for a few long responses. In exact, they compute gradients "
        "meanwhile, and race leaves slow responses to a long round. The driver, the policies and "
        "the grading are real. The GPUs are emulated with the RollPacker paper's decode times and "
        "lengths, and nothing is trained."
    )
    title = "One step of a 7B model on 16 emulated GPUs"
    return Section("cluster", title, text, gantt={"charts": charts, "select": False})


def _page(modes: Sequence[_Mode], summary: Mapping[str, Any]) -> Page:
    best, cluster = summary["recommended_mode"], summary.get("cluster", {})
    honest = cluster and all(each["honest"] for each in cluster.values())
    return Page(
        title="Tail batching, mode by mode",
        subtitle="The same prompts, seeds and model, trained in each mode · "
        + ", ".join(mode.name for mode in modes)
        + f" · recommended: {best}",
        tiles=_tiles(modes, summary),
        sections=[
            _results(modes, summary),
            *([emulated_step(cluster)] if honest else []),
            _gantts(modes),
            _curves(modes, summary),
            _times(modes),
        ],
        facts={"summary": dict(summary), "early_step": _early_step(modes)},
    )


def _early_step(modes: Sequence[_Mode]) -> int:
    common = sorted(set.intersection(*(set(mode.gantt.windows) for mode in modes)))
    if not common:
        raise ReportError("the runs have no step in common to compare")
    return common[min(EARLY_STEP, len(common) - 1)]


def _tiles(modes: Sequence[_Mode], summary: Mapping[str, Any]) -> list[Tile]:
    best = summary["recommended_mode"]
    results = summary["modes"]
    speedup = summary.get("speedup", {})
    others = number(summary, "other_load") or 0.0
    tiles = [
        Tile(
            f"Speed-up of {best}",
            _times_text(number(speedup, "wall")),
            "wall time, off / "
            + best
            + (
                f" (noise: other processes took {others:.0%} of the cores)"
                if others > NOISY
                else ""
            ),
        ),
        Tile("Decode steps", _times_text(number(speedup, "decode_steps")), f"off / {best}"),
    ]
    before = number(summary["before"], "sampled_accuracy")
    for mode in modes:
        after = number(mode.result, "sampled_accuracy")
        tiles.append(
            Tile(f"Accuracy, {mode.name}", f"{plain(before)} → {plain(after)}", "sampled, held out")
        )
    kept = number(results[best], "kept_vs_true_len") if best in results else None
    note = "1 means no length bias"
    tiles.append(Tile(f"Kept / true length, {best}", plain(kept), note))
    return tiles


def _times_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


_RESULTS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("wall time", "train_wall_s", seconds),
    ("wall time per step", "step_s", seconds),
    ("wall time of rollouts", "rollout_wall_s", seconds),
    ("processor time of rollouts", "rollout_cpu_s", seconds),
    ("rollout bubble", "rollout_bubble", share),
    ("decode steps", "decode_steps", count),
    ("decoded tokens", "decoded_tokens", count),
    ("kept tokens", "kept_tokens", count),
    ("kept / true length", "kept_vs_true_len", plain),
    ("truncated", "clipped_ratio", share),
    ("prompts trained", "prompts_trained", count),
)


def _results(modes: Sequence[_Mode], summary: Mapping[str, Any]) -> Section:
    results = [dict(mode.result) | mode.measured() for mode in modes]
    rows = [
        [label, *(shown(number(result, key)) for result in results)]
        for label, key, shown in _RESULTS
    ]
    for label, key in (
        ("sampled accuracy", "sampled_accuracy"),
        ("greedy accuracy", "greedy_accuracy"),
    ):
        before = plain(number(summary["before"], key))
        rows.append(
            [f"{label}, from {before}", *(plain(number(result, key)) for result in results)]
        )
    text = (
        "A mode is better than off if its wall time is lower, its accuracy is not, and its kept / "
        "true length stays at 1. Below 1, the updates see shorter responses than the model writes."
    )
    if scope := summary.get("scope"):
        text += f" {scope}"
    table = Grid(header=["", *(mode.name for mode in modes)], rows=rows)
    return Section("results", "Results", text, table=table)


def _gantts(modes: Sequence[_Mode]) -> Section:
    step = _early_step(modes)
    charts = [mode.gantt.chart(step) | {"name": mode.name} for mode in modes]
    text = (
        f"Step {step} in each mode, on one time axis. Each bar is a response in its decode slot. "
        "The strip on top of a worker is its gradient work, and yellow is its idle time. In off, "
        "gradients wait for the last response. The other modes fill that time or cut it."
    )
    gantt = {"charts": charts, "select": False}
    return Section("gantt", "The same early step in each mode", text, gantt=gantt)


def _curves(modes: Sequence[_Mode], summary: Mapping[str, Any]) -> Section:
    accuracy = number(summary["before"], "sampled_accuracy")
    text = (
        "On the left, modes that learn alike lie on each other. A mode below off pays for its "
        "speed with learning. On the right, the mode furthest to the left is ahead in wall time. "
        "Racing selects the kept responses, whose reward this is, so the held-out accuracies above "
        "decide."
    )
    if accuracy is not None:
        text += f" Held-out sampled accuracy was {accuracy:.3f} before training."
    return Section(
        "learning",
        "Learning over steps and over wall time",
        text,
        figure=learning_curves({mode.name: mode.run.metrics for mode in modes}),
    )


def learning_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Smoothed reward of each mode by step (left) and by wall time (right)."""
    data: list[Figure] = []
    for (name, lines), colour in zip(metrics.items(), _colours(len(metrics)), strict=True):
        window = max(3, len(lines) // 12) | 1
        reward = figures.smooth(figures.column(lines, "reward"), window)
        wall = list(accumulate(value or 0.0 for value in figures.column(lines, "step_time")))
        steps = [line["step"] for line in lines]
        data.append(figures.line(steps, reward, name, colour, legendgroup=name))
        right = {"xaxis": "x2", "yaxis": "y2", "legendgroup": name, "showlegend": False}
        data.append(figures.line(wall, reward, name, colour, **right))
    layout = {
        "height": 340,
        "xaxis": {"title": "step", "domain": [0.0, 0.47]},
        "yaxis": {"title": "reward (moving mean)"},
        "xaxis2": {"title": "seconds of training", "domain": [0.53, 1.0], "anchor": "y2"},
        "yaxis2": {"anchor": "x2", "matches": "y", "showticklabels": False},
    }
    return {"data": data, "layout": layout}


def _colours(needed: int) -> list[str]:
    return [MODES[i % len(MODES)] for i in range(needed)]


def _times(modes: Sequence[_Mode]) -> Section:
    data = [
        figures.line(
            [line["step"] for line in mode.run.metrics],
            figures.column(mode.run.metrics, "step_time"),
            mode.name,
            colour,
        )
        for mode, colour in zip(modes, _colours(len(modes)), strict=True)
    ]
    layout = {
        "height": 300,
        "xaxis": {"title": "step"},
        "yaxis": {"title": "seconds per step", "rangemode": "tozero"},
    }
    text = (
        "Lines that stay apart show a lasting gain. If the lines meet while the lengths of the "
        "responses change, the gain depends on these lengths."
    )
    figure = {"data": data, "layout": layout}
    return Section("times", "Time of each step", text, figure=figure)
