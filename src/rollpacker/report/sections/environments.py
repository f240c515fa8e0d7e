"""The report's section on environments: turns, waits and calls by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from rollpacker.report.drawing import figures
from rollpacker.report.drawing.figures import Figure
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.drawing.page import Section, count, seconds, share
from rollpacker.report.reading.run_folder import RunFolder

_TURNS, _WAITED, _IDLE, _CALLS = "#3f7fbf", "#d9822b", "#7e6b9e", "#4b9b72"
_FAILED = figures.COLOURS["failed"]


def environment_facts(run: RunFolder, gantt: Gantt) -> dict[str, Any]:
    """Numbers of the whole run, unrounded; empty where no environment took part.

    ``turns`` and ``wait_s`` are means of a kept response, ``wait_share`` of the rollouts that it
    waited in; ``tools_idle_s`` are device seconds of the rollouts that were idle by tools,
    ``tools_bubble`` is their share; ``tool_calls`` and ``failed_calls`` count all responses;
    ``audited_turns`` and ``audited_wait`` are kept over true, where a race was audited.
    """
    samples = run.samples
    if "turn_tokens" not in samples.columns:
        return {}
    kept = samples.filter((pl.col("state") == "kept") & pl.col("turn_tokens").is_not_null())
    if kept.is_empty():
        return {}
    rollout_s = {step: end - start for step, (start, end, _) in gantt.windows.items()}
    waited = kept.select(
        "step", turns=pl.col("turn_tokens").list.len(), wait_s=pl.col("wait_s").list.sum()
    )
    spent = sum(rollout_s[step] for step in waited["step"])
    idle_s, whole_s = (float(gantt.bubbles[n].sum()) for n in ("rollout_tools_s", "rollout_s"))
    return {
        "turns": waited["turns"].mean(),
        "wait_s": waited["wait_s"].mean(),
        "wait_share": float(waited["wait_s"].sum()) / spent if spent else None,
        "tools_idle_s": idle_s,
        "tools_bubble": idle_s / whole_s if whole_s else 0.0,
        "tool_calls": int(samples["tool_calls"].sum()),
        "failed_calls": int(samples["failed_calls"].sum()),
        **{f"audited_{name}": value for name in ("turns", "wait") if (value := _last(run, name))},
    }


def _last(run: RunFolder, name: str) -> float | None:
    """The newest audits' word."""
    key = f"tail/audited_kept_vs_true_{name}"
    return next((line[key] for line in reversed(run.metrics) if key in line), None)


def environment_section(run: RunFolder, gantt: Gantt, facts: Mapping[str, Any]) -> Section | None:
    """Curves of a step's turns, waits and calls; None where no environment took part."""
    if "turns" not in facts:
        return None
    text = (
        f"A response had {facts['turns']:.1f} turns and waited {seconds(facts['wait_s'])} for "
        f"its environment, {share(facts['wait_share'])} of its rollout (means of the kept ones). "
        "Devices were idle because all that they held was waiting in "
        f"{share(facts['tools_bubble'])} of the rollouts' device time: this is what faster tools "
        "or more responses at a time would save. A response may wait long and cost nothing, as "
        "long as others decode meanwhile. "
    )
    if facts["tool_calls"]:
        text += (
            f"Of {count(facts['tool_calls'])} calls, those of responses that were thrown away "
            f"included, {count(facts['failed_calls'])} failed "
            f"({share(facts['failed_calls'] / facts['tool_calls'])})."
        )
    else:
        text += "No tool was called."
    if "audited_turns" in facts:
        text += (
            " On audited prompts, whose responses all ran to their end, those that the race would "
            f"have kept had {share(facts['audited_turns'])} of the turns of all"
        )
        waits = "audited_wait" in facts
        text += f" and {share(facts['audited_wait'])} of their waiting." if waits else "."
    figure = _figure(run, gantt)
    return Section("environment", "Turns and tools", text, figure=figure)


def _figure(run: RunFolder, gantt: Gantt) -> Figure:
    """Turns and calls on the left, seconds and shares on the right; by step."""
    metrics = run.metrics
    steps = [line["step"] for line in metrics]
    wait_s = figures.column(metrics, "environment/wait_s")
    rollout_s = figures.column(metrics, "timing_s/rollout")
    calls = run.samples.group_by("step").agg(pl.sum("tool_calls", "failed_calls"))
    made = {step: numbers for step, *numbers in calls.iter_rows()}
    curves = [
        ("turns a response", figures.column(metrics, "environment/turns"), _TURNS, ""),
        ("calls", [made.get(step, (None, None))[0] for step in steps], _CALLS, "2"),
        ("failed calls", [made.get(step, (None, None))[1] for step in steps], _FAILED, "2"),
        ("seconds waited", wait_s, _WAITED, "3"),
        ("waited, of the rollout", _shares(wait_s, rollout_s), _WAITED, "4"),
        ("devices idle by tools", [gantt.tools.get(step) for step in steps], _IDLE, "4"),
    ]
    data = [
        figures.line(steps, values, name, colour, xaxis=f"x{at}", yaxis=f"y{at}")
        for name, values, colour, at in curves
    ]
    left, right, low, high = [0.0, 0.46], [0.54, 1.0], [0.0, 0.42], [0.58, 1.0]
    axis: Figure = {"rangemode": "tozero"}
    layout: Figure = {
        "height": 440,
        "xaxis": {"domain": left, "anchor": "y"},
        "yaxis": axis | {"domain": high, "title": "turns"},
        "xaxis2": {"domain": left, "anchor": "y2", "title": "step"},
        "yaxis2": axis | {"domain": low, "anchor": "x2", "title": "calls a step"},
        "xaxis3": {"domain": right, "anchor": "y3"},
        "yaxis3": axis | {"domain": high, "anchor": "x3", "title": "seconds a response"},
        "xaxis4": {"domain": right, "anchor": "y4", "title": "step"},
        "yaxis4": axis | {"domain": low, "anchor": "x4", "title": "share", "tickformat": ".0%"},
    }
    return {"data": data, "layout": layout}


def _shares(parts: list[float | None], wholes: list[float | None]) -> list[float | None]:
    pairs = zip(parts, wholes, strict=True)
    return [None if part is None or not whole else part / whole for part, whole in pairs]
