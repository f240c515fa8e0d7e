"""The report of a workload trace: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl

from rollpacker.polytrace.describe import (
    Layout,
    TaskReport,
    reward_time_share,
    sentences,
    synchronous_rounds,
    tool_latency_share,
)
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics import finished, lengths_of, visits
from rollpacker.report.drawing import page, trace_figures
from rollpacker.report.drawing.page import Grid, Page, Section, Tile, count, share

_TABLE = ("task", "responses", "mean", "p50", "p75", "p99", "max", "at cap", "ICC", "ICC log")
_TABLE += ("AUC 1st", "AUC 4th", "idle", "bubble")


def write_trace_report(
    trace: Trace, reports: Mapping[str, TaskReport], out: Path, layout: Layout | None = None
) -> Path:
    """Write a page of plots and plain sentences, and return its path. ``reports``: results of
    ``characterize``, by task. A missing folder of ``out`` is made."""
    return page.write_page(_page(trace, reports, layout or Layout()), out)


def _page(trace: Trace, reports: Mapping[str, TaskReport], layout: Layout) -> Page:
    sections = [_plainly(place, *item) for place, item in enumerate(reports.items())]
    sections.append(_table(reports))
    for place, (task, report) in enumerate(reports.items()):
        part = _Task(place, task, trace, report, layout)
        sections += part.sections(several=len(reports) > 1)
    named = ", ".join(reports)
    engines = f"{layout.workers} engines of {layout.slots} sequences"
    return Page(
        title=f"Workload: {named}",
        subtitle=f"waiting is estimated for {engines}, in synchronous rounds",
        tiles=_tiles(next(iter(reports.values()))) if len(reports) == 1 else [],
        sections=sections,
        facts={task: asdict(report) for task, report in reports.items()},
    )


def _tiles(report: TaskReport) -> list[Tile]:
    return [
        Tile(
            "Responses",
            count(report.responses),
            f"{count(report.prompts)} prompts, {count(report.steps)} steps",
        ),
        Tile("Median → longest", f"{count(report.p50)} → {count(report.max)}", "tokens"),
        Tile("Engines idle", share(report.idle_fraction), "in synchronous rounds"),
    ]


def _plainly(place: int, task: str, report: TaskReport) -> Section:
    told = ". ".join(each[0].upper() + each[1:] for each in sentences(report))
    return Section(f"plainly-{place}", f"In plain words: {task}", f"{told}.")


def _table(reports: Mapping[str, TaskReport]) -> Section:
    rows = [
        (
            task,
            *(count(value) for value in (each.responses, each.mean, each.p50, each.p75)),
            *(count(value) for value in (each.p99, each.max)),
            share(each.cap_share),
            *(
                "–" if value is None else f"{value:.2f}"
                for value in (each.icc, each.icc_log, each.tail_auc_first, each.tail_auc_fourth)
            ),
            share(each.idle_fraction),
            share(each.bubble_fraction),
        )
        for task, each in reports.items()
    ]
    text = (
        "Lengths in tokens. ICC: the share of the variance of length that lies between prompts. "
        "AUC: the chance that the first, or the fourth, response to finish ranks a prompt of the "
        "tail above another prompt. 0.5 is a coin toss."
    )
    table = Grid(header=_TABLE, rows=rows)
    return Section("numbers", "Numbers", text, table=table)


class _Task:
    def __init__(
        self, place: int, task: str, trace: Trace, report: TaskReport, layout: Layout
    ) -> None:
        mine = pl.col("task") == task
        self.place, self.task, self.report = place, task, report
        self.samples = finished(trace.samples.filter(mine)).sort("step", "prompt", "index")
        self.batches = trace.reward_batches.filter(mine)
        self.steps = trace_figures.by_step(self.samples)
        self.rounds = synchronous_rounds(self.samples, layout)

    def sections(self, *, several: bool) -> list[Section]:
        parts = [
            self._lengths(),
            *self._prompts(),
            self._over_steps(),
            self._waiting(),
            *self._tools(),
            *self._rewards(),
        ]
        if not several:
            return parts
        return [replace(part, title=f"{self.task}: {part.title}") for part in parts]

    def _id(self, name: str) -> str:
        return f"{name}-{self.place}"

    def _lengths(self) -> Section:
        report = self.report
        names = ("p50", "p75", "p90", "p99", "max")
        quantiles = {name: getattr(report, name) for name in names}
        tokens = lengths_of(self.samples)
        cap = "" if report.cap is None else f" The cap is {count(report.cap)} tokens."
        return Section(
            self._id("lengths"),
            "Response lengths",
            f"A synchronous round waits for the right end.{cap}",
            figure=trace_figures.lengths(tokens, quantiles),
        )

    def _prompts(self) -> list[Section]:
        tokens = lengths_of(self.samples)
        figure = trace_figures.within_and_between(tokens, visits(self.samples))
        if figure is None:
            return []
        text = (
            "A dot is a response, against the others of its prompt. Near the line, the prompt "
            "determines the length. In a shapeless cloud, chance does. On a tall cloud, racing "
            "responses gains most and biases most."
        )
        title = "Lengths within and between prompts"
        return [Section(self._id("prompts"), title, text, figure=figure)]

    def _over_steps(self) -> Section:
        drift = self.report.drift
        text = (
            "Too few steps for a trend."
            if drift is None
            else f"Log length grows by {drift.slope:+.4f} per step (p-value {drift.slope_p:.2g}). "
            f"The p-value of equal lengths in all steps is {drift.differ_p:.2g}."
        )
        return Section(
            self._id("steps"),
            "Lengths over steps",
            text,
            figure=trace_figures.over_steps(self.samples),
        )

    def _waiting(self) -> Section:
        report = self.report
        text = (
            f"Over all rounds, engines are idle for {share(report.idle_fraction)} of the time, and "
            f"{share(report.bubble_fraction)} of the decode slots' time is empty. The "
            "busiest data-parallel rank has "
            f"{report.load_imbalance.as_dealt:.2f}x the mean load, balanced by length "
            f"{report.load_imbalance.balanced:.2f}x."
        )
        return Section(
            self._id("waiting"),
            "Waiting in synchronous rounds",
            text,
            figure=trace_figures.waiting(self.rounds),
        )

    def _tools(self) -> list[Section]:
        calls = self.samples.select(pl.col("tools").explode()).to_series().struct.unnest()
        seconds = calls["latency_s"].drop_nulls().to_numpy()
        seconds = seconds[seconds > 0.0]
        if seconds.size == 0:
            return []
        part = self.report.tool_latency_share
        text = (
            f"{count(seconds.size)} timed calls, median {page.seconds(float(np.median(seconds)))}, "
            f"99th percentile {page.seconds(float(np.quantile(seconds, 0.99)))}. "
        )
        text += (
            "The trace lacks the engine's own time, so the share of the tools is unknown."
            if part is None
            else f"Tools take {share(part)} of the time of a response."
        )
        figure = trace_figures.seconds(seconds, "a tool call")
        found = [Section(self._id("tools"), "Tool latency", text, figure=figure)]
        by_step = {step: tool_latency_share(rows) for step, rows in self.steps}
        return found + _share_section(self._id("tool-share"), "Time in tools", "tools", by_step)

    def _rewards(self) -> list[Section]:
        by_step = {
            step: reward_time_share(
                rows, self.batches.filter(pl.col("step") == step), {step: self.rounds[step]}
            )
            for step, rows in self.steps
        }
        found = _share_section(self._id("reward-share"), "Time in rewards", "rewards", by_step)
        seconds = self.samples["reward_s"].drop_nulls().to_numpy()
        seconds = seconds[seconds > 0.0]
        if seconds.size == 0:
            return found
        text = f"{count(seconds.size)} graded responses."
        figure = trace_figures.seconds(seconds, "a reward")
        title = "Reward latency"
        return [*found, Section(self._id("rewards"), title, text, figure=figure)]


def _share_section(
    id: str, title: str, name: str, by_step: Mapping[int, float | None]
) -> list[Section]:
    known = {step: value for step, value in by_step.items() if value is not None}
    if not known:
        return []
    text = "Share of each step's time, if the phases run one after the other."
    return [Section(id, title, text, figure=trace_figures.share(name, known))]
