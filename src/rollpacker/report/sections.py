"""Longer sections of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.config import RunConfig
from rollpacker.core import sample_table as schema
from rollpacker.report.drawing import figures
from rollpacker.report.drawing.figures import Figure, number, present
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.drawing.page import Grid, Section, Tile, count, embed, plain, seconds, share
from rollpacker.report.reading.conversations import Message, conversation, turns_of
from rollpacker.report.reading.responses import load
from rollpacker.report.reading.run_folder import RunFolder
from rollpacker.runtime.record.metrics import EXPLAINED, MEASURED, AgreementAlarm

# --- agreement ------------------------------------------------------------------------------------


def agreement_section(run: RunFolder) -> list[Section]:
    """Report the sampler-trainer agreement and the run's warnings, or nothing if not measured."""
    steps = [each for each in run.metrics if all(name in each for name in MEASURED)]
    if not steps:
        return []
    apart, effective = (present(steps, name) for name in MEASURED)
    text = ""
    if apart and effective:
        text = (
            f"The log-probabilities of sampler and trainer differ by {_short(apart)} nats per "
            f"token in the mean of all steps, and by {max(apart):.2g} in the worst step. The "
            f"effective sample size is at least {share(min(effective))}. Probability ratios are "
            f"{_ends(run)}."
        )
    if odd := sum(any(number(each, name) is None for name in MEASURED) for each in steps):
        text += f" In {odd} of {len(steps)} steps they are not finite."
    try:
        config = RunConfig.model_validate(run.config)
    except ValueError:  # of another version
        return [Section("agreement", "Sampler and trainer", text)]
    alarm = AgreementAlarm.of(config)
    if alarm is not None:
        said = [line for each in run.metrics if (line := alarm.check(each))]
        text += "".join(f" {line}." for line in said) or (
            f" {config.model.dtype} explains {EXPLAINED[config.model.dtype]:g} nats: they agree."
        )
    return [Section("agreement", "Sampler and trainer", text)]


def _short(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2g}"


def _ends(run: RunFolder) -> str:
    smallest, largest = (present(run.metrics, f"sampler/ratio_{end}") for end in ("min", "max"))
    return f"{plain(min(smallest, default=None))} to {plain(max(largest, default=None))}"


# --- browser --------------------------------------------------------------------------------------

MOST_BYTES = 10_000_000
PER_KIND = 8
LONGEST = 20_000
"""Characters of a text. Longer texts lose their middle. A conversation's messages share this
limit, but each may have ``_SHORTEST``."""
_SHORTEST = 1_000
KINDS = ("best", "worst", "longest", "random")
_GOLDEN = 0.6180339887498949


def browser_section(run: Path, samples: pl.DataFrame) -> Section:
    """Show best, worst, longest and random responses of each step, for search. ``samples``: the
    run's table without texts."""
    title, id_ = "Responses", "responses"
    chosen = _chosen(samples)
    rows, prompts = _within(run, chosen)
    if samples.is_empty():
        return Section(id_, title, "No response can be shown, because their table cannot be read.")
    if not rows:
        text = "No texts were kept. A run with samples.texts=true shows its responses here."
        return Section(id_, title, text)
    data = {
        "rows": rows,
        "prompts": prompts,
        "kinds": KINDS,
        "rewards": list(schema.reward_columns(samples).values()),
    }
    text = (
        f"{count(len(rows))} of {count(samples.height)} responses are in this page: each step's "
        f"{PER_KIND} best, worst and longest and {PER_KIND} at random"
        + (f", up to {MOST_BYTES / 1e6:.0f} MB" if len(rows) < chosen.height else "")
        + ". The search finds these only, 'rollpacker samples RUN --grep TEXT' finds all."
    )
    return Section(id_, title, text, browser=data)


def _chosen(samples: pl.DataFrame) -> pl.DataFrame:
    """Rank a step's responses by each of ``KINDS``: columns ``attempt`` and ``KINDS`` (rank or
    null). The first of each kind of every step come first, then the second ones. Early and late
    steps alternate."""
    reward, tokens = pl.col("reward"), pl.col("tokens")
    keys = {
        "best": -reward,
        "worst": reward,
        "longest": -tokens,
        "random": pl.col("attempt").hash(seed=0),
    }
    places = [key.rank("ordinal").over("step").alias(kind) for kind, key in keys.items()]
    order = samples.sort("attempt").with_columns(places)
    listed = [pl.when(pl.col(kind) <= PER_KIND).then(pl.col(kind)).alias(kind) for kind in KINDS]
    turn = (pl.col("step").rank("dense") * _GOLDEN) % 1.0
    return (
        order.with_columns(listed)
        .with_columns(place=pl.min_horizontal(KINDS), turn=turn)
        .drop_nulls("place")
        .sort("place", "turn", "attempt")
        .select("attempt", *KINDS)
    )


def _within(run: Path, chosen: pl.DataFrame) -> tuple[list[list[Any]], list[str]]:
    rows: list[list[Any]] = []
    prompts: dict[str, int] = {}
    left = MOST_BYTES
    for part in chosen.iter_slices(1_000):
        places = dict(zip(part["attempt"], part.select(KINDS).iter_rows(), strict=True))
        for found in load(run, part["attempt"]):
            if found["completion"] is None:
                continue
            prompt = _cut(found["prompt_text"] or "")
            row = _row(found, prompts.get(prompt, len(prompts)), places[found["attempt"]])
            left -= len(embed(row).encode())
            if prompt not in prompts:
                left -= len(embed(prompt).encode()) + 1
            if left < len(rows):  # a comma each
                return rows, list(prompts)
            prompts.setdefault(prompt, len(prompts))
            rows.append(row)
    return rows, list(prompts)


def _row(found: dict[str, Any], prompt: int, places: tuple[int | None, ...]) -> list[Any]:
    """A row for ``browser.js``, which reads by position. A conversation replaces the text."""
    names = ("step", "prompt", "sample_index", "reward", "tokens", "state", "finish_reason")
    row = [*(found[name] for name in names), list(found["rewards"].values()), places, prompt]
    turns, messages = turns_of(found), conversation(found)
    if messages is None:
        row.append(_cut(found["completion"]))
        return [*row, turns, None] if turns else row
    longest = max(LONGEST // len(messages), _SHORTEST)
    return [*row, "", turns, [_said(message, longest) for message in messages]]


def _said(message: Message, longest: int) -> list[Any]:
    about = f"turn {message.turn}: {message.about}" if message.turn else ""
    calls = [(call.name, _cut(call.arguments, longest)) for call in message.calls]
    content = _cut(message.content, longest)
    return [message.role, message.name, about, content, calls, message.errors]


def _cut(text: str, longest: int = LONGEST) -> str:
    if len(text) <= longest:
        return text
    left_out = f"\n[... {len(text) - longest:,} characters are left out here ...]\n"
    return text[: longest // 2] + left_out + text[-longest // 2 :]


# --- environments ---------------------------------------------------------------------------------

_TURNS, _WAITED, _IDLE, _CALLS = "#3f7fbf", "#d9822b", "#7e6b9e", "#4b9b72"
_FAILED = figures.COLOURS["failed"]


def environment_facts(run: RunFolder, gantt: Gantt) -> dict[str, Any]:
    """Return numbers of the whole run, unrounded. Empty if the run has no environment.

    ``turns`` and ``wait_s`` are means per kept response, ``wait_share`` is the share of their
    rollouts. ``tools_idle_s`` are device seconds of rollouts that were idle by tools,
    ``tools_bubble`` is their share. ``tool_calls`` and ``failed_calls`` count all responses.
    ``audited_turns`` and ``audited_wait`` are kept over true, if a race was audited.
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
    key = f"tail/audited_kept_vs_true_{name}"
    return next((line[key] for line in reversed(run.metrics) if key in line), None)


def environment_section(run: RunFolder, gantt: Gantt, facts: Mapping[str, Any]) -> Section | None:
    """Plot turns, waits and calls by step. None if the run has no environment."""
    if "turns" not in facts:
        return None
    text = (
        f"A response had {facts['turns']:.1f} turns and waited {seconds(facts['wait_s'])} for "
        f"its environment, {share(facts['wait_share'])} of its rollout (means of the kept ones). "
        f"In {share(facts['tools_bubble'])} of the rollouts' device time, devices were idle "
        "because all their responses waited. Faster tools or more responses at a time would save "
        "this time. A response's wait costs nothing while others decode. "
    )
    if facts["tool_calls"]:
        text += (
            f"{count(facts['failed_calls'])} of {count(facts['tool_calls'])} calls failed "
            f"({share(facts['failed_calls'] / facts['tool_calls'])}), including those of responses "
            "that were thrown away."
        )
    else:
        text += "No tool was called."
    if "audited_turns" in facts:
        text += (
            " On audited prompts, whose responses all ran to their end, the race's winners had "
            f"{share(facts['audited_turns'])} of the turns of all"
        )
        waits = "audited_wait" in facts
        text += f" and {share(facts['audited_wait'])} of their waiting." if waits else "."
    figure = _figure(run, gantt)
    return Section("environment", "Turns and tools", text, figure=figure)


def _figure(run: RunFolder, gantt: Gantt) -> Figure:
    metrics = run.metrics
    steps = [line["step"] for line in metrics]
    wait_s = figures.column(metrics, "environment/wait_s")
    rollout_s = figures.column(metrics, "timing_s/rollout")
    calls = run.samples.group_by("step").agg(pl.sum("tool_calls", "failed_calls"))
    made = {step: numbers for step, *numbers in calls.iter_rows()}
    curves = [
        ("turns per response", figures.column(metrics, "environment/turns"), _TURNS, ""),
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
        "yaxis2": axis | {"domain": low, "anchor": "x2", "title": "calls per step"},
        "xaxis3": {"domain": right, "anchor": "y3"},
        "yaxis3": axis | {"domain": high, "anchor": "x3", "title": "seconds per response"},
        "xaxis4": {"domain": right, "anchor": "y4", "title": "step"},
        "yaxis4": axis | {"domain": low, "anchor": "x4", "title": "share", "tickformat": ".0%"},
    }
    return {"data": data, "layout": layout}


def _shares(parts: list[float | None], wholes: list[float | None]) -> list[float | None]:
    pairs = zip(parts, wholes, strict=True)
    return [None if part is None or not whole else part / whole for part, whole in pairs]


# --- programs -------------------------------------------------------------------------------------

SHOWN = 10

_TIMEOUTS = ("tle_cpu", "tle_idle")


def program_section(samples: pl.DataFrame) -> Section | None:
    """List the slowest and the most failing tests. None if no reward runs programs."""
    if "code_verdict" not in samples.columns:
        return None
    graded = samples.filter(pl.col("code_verdict").is_not_null())
    title = "Programs and their tests"
    if graded.is_empty():
        return Section("programs", title, "No program was graded.")
    return Section("programs", title, _text(graded), table=_table(test_times(graded)))


def test_times(samples: pl.DataFrame) -> pl.DataFrame:
    """Return one row per prompt and test. Columns ``passed`` and ``timeouts`` are shares of the
    ``runs``. ``longest_s``, ``longest_passed_s`` (null if none passed) and ``total_s`` are CPU
    seconds."""
    passed = pl.col("verdict") == "pass"
    return (
        samples.select(
            "prompt",
            pl.int_ranges(pl.col("test_verdicts").list.len()).alias("test"),
            pl.col("test_verdicts").alias("verdict"),
            pl.col("test_cpu_s").alias("cpu_s"),
        )
        .explode("test", "verdict", "cpu_s")
        .drop_nulls("verdict")
        .group_by("prompt", "test")
        .agg(
            pl.len().alias("runs"),
            passed.mean().alias("passed"),
            pl.col("verdict").is_in(_TIMEOUTS).mean().alias("timeouts"),
            pl.col("cpu_s").max().alias("longest_s"),
            pl.col("cpu_s").filter(passed).max().alias("longest_passed_s"),
            pl.col("cpu_s").sum().alias("total_s"),
        )
        .sort("prompt", "test")
    )


def _text(graded: pl.DataFrame) -> str:
    verdicts = graded["code_verdict"].to_list()
    forgeable = sum(graded["forgeable"].to_list())
    cpu_s = sum(sum(tests) for tests in graded["test_cpu_s"].to_list())

    def of(*wanted: str) -> str:
        return share(sum(verdict in wanted for verdict in verdicts) / len(verdicts))

    text = (
        f"{count(graded.height)} responses were graded by their programs: "
        f"{of('pass')} passed all tests, "
        f"{of(*_TIMEOUTS)} ran into a timeout, "
        f"{of('crash')} crashed and "
        f"{of('no_code')} had no program. They took "
        f"{seconds(cpu_s)} of CPU time at sandbox level "
        f"{', '.join(sorted(set(graded['sandbox_level'])))}. "
    )
    if forgeable:
        text += (
            f"{count(forgeable)} of them have asserts, whose success a program can forge: "
            "trust those scores less. "
        )
    return text + (
        "A test that never passes may be wrong. If a test's longest time is far above that of "
        "passing programs, waiting longer does not help (grading.code_timeout). The table lists "
        f"the {SHOWN} slowest tests and the {SHOWN} that fail most."
    )


def _table(tests: pl.DataFrame) -> Grid:
    slow = tests.sort("longest_s", descending=True, maintain_order=True).head(SHOWN)
    failing = tests.filter(pl.col("passed") < 1.0)
    failing = failing.sort("passed", "runs", descending=[False, True], maintain_order=True).head(
        SHOWN
    )
    listed = pl.concat([slow, failing]).unique(("prompt", "test"), maintain_order=True)
    header = ("prompt", "test", "runs", "passed", "timeouts", "longest", "longest that passed")
    return Grid(
        header=(*header, "all runs"),
        rows=[
            (
                row["prompt"],
                str(row["test"]),
                count(row["runs"]),
                share(row["passed"]),
                share(row["timeouts"]),
                seconds(row["longest_s"]),
                seconds(row["longest_passed_s"]),
                seconds(row["total_s"]),
            )
            for row in listed.iter_rows(named=True)
        ],
    )


# --- tail costs -----------------------------------------------------------------------------------


def stale_tiles(run: RunFolder) -> list[Tile]:
    """Report stale tokens of mode ``partial``, which has no length bias. Empty in other modes."""
    names = ("partial/stale_tokens", "partial/stale_tokens_of_longest")
    means = [present(run.metrics, name) for name in names]
    if not all(means):
        return []
    every, longest = (share(sum(values) / len(values)) for values in means)
    return [Tile("Stale tokens", every, f"of earlier weights ({longest} of the longest tenth)")]


def aborted_section(lost: pl.DataFrame, facts: dict[str, Any]) -> Section:
    """Plot tokens that were generated and thrown away."""
    title = "Tokens thrown away"
    if facts["lost_tokens"] == 0:
        return Section(
            "aborted", title, "None: every generated token was trained on, or waits to be."
        )
    text = (
        f"{count(facts['lost_tokens'])} generated tokens ({share(facts['lost_share'])}) reached "
        "no update. Short rounds abort the responses that lose the race. Long rounds sample them "
        "again and abort nothing. High bars without lower step times mean that racing does not "
        "pay here."
    )
    return Section("aborted", title, text, figure=figures.aborted(lost))
