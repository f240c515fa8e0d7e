"""What the runs of the study have come to: rows, differences, and what pages say of them."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import polars as pl
from scipy import stats

from rollpacker.polytrace.statistics import correlations

BASE = ("off", "exact")
"""The same update but for rounding: together they are what the others are compared with."""
_PART = 30
"""Steps whose means stand for the start and the end of a run."""
_GRID = np.linspace(0.1, 1.0, 10)
"""Shares of the prompts at which accuracies are averaged."""
Row = Mapping[str, Any]
Runs = Mapping[int, Sequence[Row]]
"""Of an arm, by seed."""
Arms = Mapping[str, Runs]
Value = Callable[[Sequence[Row], Mapping[str, float]], float]


def finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    path = folder / "summary.json"
    return path.exists() and "after" in json.loads(path.read_text(encoding="utf-8"))


def curve(folder: Path) -> list[dict[str, Any]]:
    """One row for each evaluation of a run, with what it had cost by then (``tokens``: prompts and
    responses that were trained on); none of one that is not over, one without numbers of one that
    failed."""
    if (folder / "failed.txt").exists():
        return [{"step": None}]
    if not finished(folder):
        return []
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    columns = ["prompt", "step", "tokens", "state"]
    samples = pl.read_parquet(folder / "samples" / "*.parquet", columns=columns)
    samples = samples.filter(pl.col("state") == "kept")
    trained = dict(samples.group_by("step").agg(pl.col("prompt").n_unique()).iter_rows())
    done = dict.fromkeys(("prompts", "tokens", "iterations", "decoded", "prefilled"), 0)
    rows = [{"step": 0, **done, **_evaluated(summary["before"])}]
    for line in steps:
        done["prompts"] += trained.get(line["step"], 0)
        done["tokens"] = line["num_tokens"]
        done["iterations"] += line["engine/steps"]
        done["decoded"] += line["engine/generated_tokens"]
        done["prefilled"] += line["engine/prefill_tokens"]
        if "eval/sampled_accuracy" in line:
            rows.append({"step": line["step"] + 1, **done, **_evaluated(line)})
    if rows[-1]["step"] != len(steps):
        rows.append({"step": len(steps), **done})
    kept = {"kept": summary["kept_tokens"]}
    rows[-1] |= kept | _evaluated(summary["after"]) | _parts(steps) | _chance(samples)
    return rows


def _evaluated(found: Row) -> dict[str, Any]:
    return {
        name: found.get(f"eval/{key}")
        for name, key in (
            ("accuracy", "sampled_accuracy"),
            ("greedy", "greedy_accuracy"),
            ("length", "sampled_mean_length"),
            ("truncated", "sampled_clipped_ratio"),
        )
    }


def _parts(steps: Sequence[Row]) -> dict[str, Any]:
    """Means of the first and the last steps, and the oldest token of any."""
    means = {
        "entropy": ("trained_tokens/entropy", steps[-_PART:]),
        "kept_vs_true_first": ("tail/kept_vs_true_len", steps[:_PART]),
        "kept_vs_true": ("tail/kept_vs_true_len", steps[-_PART:]),
        "stale": ("partial/stale_tokens", steps[-_PART:]),
        "stale_long": ("partial/stale_tokens_of_longest", steps[-_PART:]),
        "moved_first": ("trained_tokens/abs_logprob_difference", steps[:_PART]),
        "moved": ("trained_tokens/abs_logprob_difference", steps[-_PART:]),
    }
    found: dict[str, Any] = {
        name: statistics.fmean(values)
        for name, (key, some) in means.items()
        if (values := [line[key] for line in some if line.get(key) is not None])
    }
    return found | {"oldest": max(line["policy_version_max_lag"] for line in steps)}


def _chance(samples: pl.DataFrame) -> dict[str, float]:
    """How much length belongs to the prompt, in the first and in the last steps."""
    last = samples["step"].max()
    assert isinstance(last, int)
    within = {
        "icc_first": samples.filter(pl.col("step") < _PART),
        "icc": samples.filter(pl.col("step") > last - _PART),
    }
    found: dict[str, float] = {}
    for name, some in within.items():
        groups = some["prompt"].rank("dense").cast(pl.Int64).to_numpy()
        tokens = some["tokens"].cast(pl.Float64).clip(1.0).to_numpy()
        found[name] = float(correlations(tokens, groups)[1])
    return found


def kept(parquet: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of earlier runs, by task, rate, seed, arm and settings as JSON."""
    runs: dict[str, list[dict[str, Any]]] = {}
    if parquet.exists():
        for row in pl.read_parquet(parquet).to_dicts():
            runs.setdefault(key_of(row), []).append(row)
    return runs


def key_of(row: Row) -> str:
    """What the rows of one run have in common."""
    return json.dumps([row[name] for name in ("task", "rate", "seed", "arm", "settings")])


def comparisons(rows: Sequence[Row]) -> dict[tuple[str, float], Arms]:
    """Runs that are compared with each other, those that failed left out: by task and rate."""
    found: dict[tuple[str, float], dict[str, dict[int, list[Row]]]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["rate"])):
        arms = found.setdefault((row["task"], row["rate"]), {})
        arms.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(row)
    for arms in found.values():
        for arm, runs in [*arms.items()]:
            arms[arm] = {
                s: each for s, each in runs.items() if each[-1].get("accuracy") is not None
            }
            if not arms[arm]:
                del arms[arm]
    return found


def tables(rows: Sequence[Row], planned: Iterable[Row]) -> str:
    """The page's tables.

    ``planned``: task, rate and arm of every run that is to be.
    """
    counts = Counter((each["task"], each["rate"], each["arm"]) for each in planned)
    parts: list[str] = []
    for (task, rate), arms in comparisons(rows).items():
        planned_of = {arm: counts[task, rate, arm] for arm in arms}
        parts += [f"### {task}, learning rate {rate:g}", "", *_learned(arms, planned_of)]
        parts += ["", *_happened(arms), ""]
    return "\n".join(parts).rstrip()


def plain_of(arms: Arms, arm: str) -> list[Runs]:
    """What an arm is compared with: nothing for ``off``, which ``exact`` is compared with alone."""
    if arm == "off":
        return []
    return [arms[name] for name in (("off",) if arm == "exact" else BASE) if name in arms]


def _learned(arms: Arms, planned: Mapping[str, int]) -> list[str]:
    lines = [
        "| arm | seeds | mean of ten evaluations | - plain | at the end | - plain "
        "| equal tokens, - plain | equal decode iterations, - plain | greedy | truncated |",
        "|---|" + "--:|" * 9,
    ]
    for arm, runs in arms.items():
        ends = [each[-1] for each in runs.values()]
        against = plain_of(arms, arm)
        cells = [
            arm,
            _seeds(runs, planned[arm]),
            _spread([whole(each) for each in runs.values()]),
            told(difference(runs, against, whole)),
            _spread([last(each) for each in runs.values()]),
            told(difference(runs, against, last)),
            *(
                told(difference(runs, against, partial(_within, key=key)))
                for key in ("tokens", "iterations")
            ),
            _mean(ends, "greedy", ".3f"),
            _mean(ends, "truncated", ".1%"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _happened(arms: Arms) -> list[str]:
    lines = [
        "| arm | prompts | length | entropy | kept/true, first / last | stale (longest) | oldest "
        "| moved, first / last | length by prompt, first / last | iterations / plain "
        "| tokens an iteration | decoded / kept | prefilled / kept |",
        "|---|" + "--:|" * 12,
    ]
    for arm, runs in arms.items():
        ends = [each[-1] for each in runs.values()]
        base = [arms[name] for name in BASE if name in arms]
        plain = [each[s][-1]["iterations"] for each in base for s in runs if s in each]
        stale = _mean(ends, "stale", ".0%")
        cells = [
            arm,
            _mean(ends, "prompts", ",.0f"),
            _mean(ends, "length", ".0f"),
            _mean(ends, "entropy", ".2f"),
            _both(ends, "kept_vs_true", ".2f") if not stale else "",
            f"{stale} ({_mean(ends, 'stale_long', '.0%')})" if stale else "",
            str(max(end["oldest"] or 0 for end in ends)) if stale else "",
            _both(ends, "moved", ".3f") if stale else "",
            _both(ends, "icc", ".2f"),
            _ratio([end["iterations"] for end in ends], plain),
            f"{statistics.fmean(end['decoded'] / end['iterations'] for end in ends):.0f}",
            f"{statistics.fmean(end['decoded'] / end['kept'] for end in ends):.2f}",
            f"{statistics.fmean(end['prefilled'] / end['kept'] for end in ends):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _seeds(runs: Runs, planned: int) -> str:
    """How many are there, of how many, and how many ended below their start."""
    collapsed = sum(each[-1]["accuracy"] < each[0]["accuracy"] for each in runs.values())
    count = f"{len(runs)}" if len(runs) >= planned else f"{len(runs)} of {planned}"
    return f"{count}, {collapsed} collapsed" if collapsed else count


def whole(rows: Sequence[Row], _: Mapping[str, float] | None = None) -> float:
    """Mean accuracy after each tenth of the prompts."""
    return float(np.mean([_at(rows, "prompts", share * rows[-1]["prompts"]) for share in _GRID]))


def last(rows: Sequence[Row], _: Mapping[str, float] | None = None) -> float:
    """Accuracy at the end."""
    return rows[-1]["accuracy"]


def _at(rows: Sequence[Row], key: str, amount: float) -> float:
    """Accuracy when so much of ``key`` was spent, between the evaluations beside it."""
    for before, after in pairwise(rows):
        if after[key] >= amount:
            share = (amount - before[key]) / max(1, after[key] - before[key])
            return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])
    return rows[-1]["accuracy"]


def _within(rows: Sequence[Row], least: Mapping[str, float], key: str) -> float:
    """Accuracy within the budget that all of a seed's runs have spent."""
    return _at(rows, key, least[key])


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two means over seeds: half of its 95% interval and its standard error, NaN of one seed."""

    mean: float
    half: float
    error: float


def difference(runs: Runs, base: Sequence[Runs], value: Value) -> Difference | None:
    """Of an arm and plain rounds. The seed is the unit: its plain runs are nearly one run, so their
    mean stands for it. Other arms part from them, so seeds are no pairs, and the interval is
    Welch's. ``value`` is told a run and the budgets that the cheapest of its seed's runs has spent.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for seed, rows in runs.items():
        others = [each[seed] for each in base if seed in each]
        if not others:
            continue
        least = {
            key: min(each[-1][key] for each in (rows, *others)) for key in ("tokens", "iterations")
        }
        ours.append(value(rows, least))
        theirs.append(statistics.fmean(value(each, least) for each in others))
    if not ours:
        return None
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    if len(ours) < 2:
        return Difference(mean, math.nan, math.nan)
    error = math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / len(ours))
    with np.errstate(all="ignore"):
        found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    half = (found.high - found.low) / 2
    return Difference(mean, 0.0 if np.isnan(half) else half, error)


def pooled(given: Sequence[Difference]) -> Difference:
    """Of several tasks, each as heavy as its inverse variance."""
    weights = [1 / each.error**2 for each in given]
    error = 1 / math.sqrt(sum(weights))
    mean = sum(w * each.mean for w, each in zip(weights, given, strict=True)) / sum(weights)
    return Difference(mean, stats.norm.ppf(0.975) * error, error)


def told(found: Difference | None, digits: int = 3) -> str:
    """As a cell shows it."""
    if found is None:
        return ""
    mean = f"{found.mean:+.{digits}f}"
    return mean if math.isnan(found.half) else f"{mean} ± {found.half:.{digits}f}"


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{statistics.fmean(values):.3f} ({low:.2f} to {high:.2f})"


def _mean(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return format(statistics.fmean(values), form) if values else ""


def _both(rows: Sequence[Row], key: str, form: str) -> str:
    return f"{_mean(rows, f'{key}_first', form)} / {_mean(rows, key, form)}"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{statistics.fmean(ours) / statistics.fmean(theirs):.2f}" if theirs else ""


# What pages say: every number of these blocks is computed from the rows.

MODES = {
    "exact": "`exact`",
    "prompts": "`prompts`",
    "race": "`race`",
    "race, long rounds of two": "`race`, `long_round_steps: 2`",
    "partial": "`partial`",
    "partial, eta 2": "`partial`, `eta_prompts: 2`",
}
TASKS = {
    "gcd": "`gcd`: length is the problem's",
    "chance": "`chance`: length is chance",
    "tools": "`tools`: length is the calls'",
    "sums": "`sums`: SmolLM2",
}
MARK, END = "<!-- accuracy -->\n", "<!-- end of accuracy -->\n"
Tasks = Mapping[str, Arms]


def blocks(found: Mapping[tuple[str, float], Arms]) -> dict[str, str]:
    """The generated part of each page that says something of the study."""
    given = {task: arms for (task, _), arms in found.items()}
    tasks = {task: given[task] for task in TASKS if task in given}
    middle, ends = _by_task(tasks, whole), _by_task(tasks, last)
    return {
        "README.md": _at_the_end(tasks),
        "docs/concepts.md": _together(tasks),
        "experiments/accuracy/README.md": "\n".join(
            ["Mean of ten evaluations:", "", *middle, "", "At the end:", "", *ends, ""]
        )
        + f"\nAll tasks:\n\n{_together(tasks)}",
    }


def put(page: str, block: str) -> str:
    """A page with this block between its marks."""
    head, _, rest = page.partition(MARK)
    return f"{head}{MARK}\n{block}\n\n{END}{rest.partition(END)[2]}"


def _differences(tasks: Tasks, arm: str, value: Value) -> dict[str, Difference]:
    given = {
        task: difference(arms[arm], plain_of(arms, arm), value)
        for task, arms in tasks.items()
        if arm in arms
    }
    return {task: each for task, each in given.items() if each and not math.isnan(each.half)}


def _by_task(tasks: Tasks, value: Value) -> list[str]:
    lines = [
        f"| mode | {' | '.join(TASKS[task] for task in tasks)} |",
        "|---|" + "--:|" * len(tasks),
    ]
    for arm, mode in MODES.items():
        each = _differences(tasks, arm, value)
        lines.append(f"| {mode} | {' | '.join(told(each.get(task)) for task in tasks)} |")
    return lines


def _together(tasks: Tasks) -> str:
    lines = [
        "| mode | mean of ten evaluations, less plain | at the end, less plain | lower at the end "
        "| decode iterations / plain, without `tools` |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm, mode in MODES.items():
        both = [_differences(tasks, arm, value) for value in (whole, last)]
        if not both[0]:
            continue
        cells = [told(pooled([*each.values()]), 4) for each in both]
        lower = sum(each.mean < 0 for each in both[1].values())
        costs = [_iterations(tasks[task], arm) for task in both[1] if task != "tools"]
        cells += [f"{lower} of {len(both[1])} tasks", ", ".join(costs)]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_facts(tasks)])


def _at_the_end(tasks: Tasks) -> str:
    lines = []
    for arm in ("exact", "prompts", "race"):
        each = _differences(tasks, arm, last)
        lower = sum(one.mean < 0 for one in each.values())
        if each:
            lines.append(
                f"- {MODES[arm]}: {told(pooled([*each.values()]), 4)}, lower in {lower} of "
                f"{len(each)} tasks"
            )
    return "\n".join(lines)


def _iterations(arms: Arms, arm: str) -> str:
    spent = {name: _at_end(arms[name].values(), "iterations") for name in {*BASE, arm}}
    return f"{spent[arm] / statistics.fmean(spent[name] for name in BASE):.2f}"


def _at_end(runs: Sequence[Sequence[Row]], key: str) -> float:
    return statistics.fmean(rows[-1][key] for rows in runs)


def _facts(tasks: Tasks) -> list[str]:
    apart = [
        f"{MODES[arm]} in `{task}`"
        for arm in MODES
        for task, each in _differences(tasks, arm, whole).items()
        if abs(each.mean) > each.half
    ]
    kept = [
        _at_end(arms["race"].values(), key)
        for arms in tasks.values()
        for key in ("kept_vs_true_first", "kept_vs_true")
        if "race" in arms
    ]
    every = {arm for arms in tasks.values() for arm in arms if arm.startswith("partial")}
    fresh = sorted(arm for arm in every if arm.endswith("uncorrected"))
    ratio = sorted(every - {*fresh, "partial, masked"})
    return [
        "95% intervals over seeds. Tasks are weighted by their inverse variances. The comparison",
        "at the end was not planned. Means of single tasks whose interval holds no zero:",
        f"{', '.join(apart) or 'none'}.",
        *([f"`race` kept {min(kept):.2f} to {max(kept):.2f} of the true length."] if kept else []),
        f"`partial` with `stale_tokens: fresh` collapsed in {_collapsed(tasks, fresh)}, with the",
        f"ratio to the sampler in {_collapsed(tasks, ratio)}.",
    ]


def _collapsed(tasks: Tasks, arms: Sequence[str]) -> str:
    runs = [rows for each in tasks.values() for arm in arms for rows in each.get(arm, {}).values()]
    return f"{sum(last(rows) < last(rows[:1]) for rows in runs)} of {len(runs)} runs"


# The picture: how far each arm is from plain rounds, with its interval.

LEFT, PANEL, GAP, ROW, HEAD, FOOT = 210, 170, 18, 28, 34, 34
MOST = 0.06
"""Of a difference that has a place; what is further away is written at the edge."""
POINT, LINE, TEXT, PALE = "#1c7ed6", "#9aa5b1", "#1f2733", "#d5dbe2"


def picture(found: Mapping[tuple[str, float], Arms]) -> str:
    """A panel for each task and learning rate, a row for each arm, as an SVG."""
    names = [*dict.fromkeys(arm for arms in found.values() for arm in arms if arm != "off")]
    width = LEFT + len(found) * (PANEL + GAP)
    height = HEAD + ROW * len(names) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(_text(LEFT - 12, _y(row), name, "end") for row, name in enumerate(names)),
    ]
    for column, ((task, rate), arms) in enumerate(found.items()):
        left = LEFT + column * (PANEL + GAP)
        parts += _panel(left, f"{task}, {rate:g}", len(names))
        for row, name in enumerate(names):
            if name in arms:
                parts += _point(left, _y(row) - 5, arms, name, whole, POINT)
                parts += _point(left, _y(row) + 6, arms, name, last, "#ffffff")
    words = (
        "accuracy less that of plain rounds (exact: less off), 95% intervals over seeds; filled: "
        "mean of ten evaluations, hollow: at the end"
    )
    return "\n".join([*parts, _text(LEFT, height - 4, words), "</svg>\n"])


def _y(row: int) -> float:
    return HEAD + ROW * (row + 0.5)


def _x(left: float, value: float) -> float:
    return left + PANEL * (0.5 + max(-1.0, min(value / MOST, 1.0)) / 2)


def _panel(left: float, title: str, rows: int) -> Iterator[str]:
    yield _text(left + PANEL / 2, HEAD - 14, title, "middle")
    for value in (-0.05, 0.0, 0.05):
        x, end = _x(left, value), HEAD + ROW * rows
        yield f'<path d="M{x:.1f} {HEAD}V{end}" stroke="{LINE if not value else PALE}"/>'
        yield _text(x, end + 12, f"{value:+.2f}" if value else "0", "middle", 10)


def _point(left: float, y: float, arms: Arms, arm: str, value: Value, fill: str) -> Iterator[str]:
    found = difference(arms[arm], plain_of(arms, arm), value)
    if found is None:
        return
    mean, half = found.mean, found.half
    if abs(mean) > MOST:
        words, anchor = (f"← {mean:+.2f}", "start") if mean < 0 else (f"{mean:+.2f} →", "end")
        yield _text(_x(left, mean), y, words, anchor, 11)
        return
    if not math.isnan(half):
        low, high = _x(left, mean - half), _x(left, mean + half)
        yield f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{POINT}" stroke-width="2"/>'
    place = f'cx="{_x(left, mean):.1f}" cy="{y}" r="4"'
    yield f'<circle {place} fill="{fill}" stroke="{POINT}" stroke-width="2"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    more = f'text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {more} dominant-baseline="middle">{escape(words)}</text>'
