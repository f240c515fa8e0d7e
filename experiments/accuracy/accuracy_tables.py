"""What the runs of the study have come to: a row an evaluation, and differences paired by seed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

_T95 = (0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for two-sided 95%, by degrees of freedom."""
BASE = "off"
_LAST = 30
"""Steps whose means stand for the end of a run."""
Row = Mapping[str, Any]


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
    rows = [
        {"step": 0, "tokens": 0, "decode_steps": 0, "decoded": 0, **_evaluated(summary["before"])}
    ]
    done = {"decode_steps": 0, "decoded": 0, "seconds": 0.0}
    for line in steps:
        done["decode_steps"] += line["engine/steps"]
        done["decoded"] += line["engine/generated_tokens"]
        done["seconds"] += line["step_time"]
        if "eval/sampled_accuracy" in line:
            rows.append(
                {"step": line["step"] + 1, "tokens": line["num_tokens"], **done, **_evaluated(line)}
            )
    if rows[-1]["step"] != len(steps):
        rows.append({"step": len(steps), "tokens": summary["num_tokens"], **done})
    kept = {"kept": summary["kept_tokens"]}
    rows[-1] |= kept | _evaluated(summary["after"]) | _end(steps)
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


def _end(steps: Sequence[Row]) -> dict[str, Any]:
    """Means of the last steps, and the oldest token of any."""
    last = steps[-_LAST:]
    means = {
        "entropy": "trained_tokens/entropy",
        "kept_vs_true": "tail/kept_vs_true_len",
        "stale": "partial/stale_tokens",
        "stale_long": "partial/stale_tokens_of_longest",
    }
    found: dict[str, Any] = {
        name: statistics.fmean(values)
        for name, key in means.items()
        if (values := [line[key] for line in last if line.get(key) is not None])
    }
    return found | {"oldest": max(line["policy_version_max_lag"] for line in steps)}


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


def tables(rows: Sequence[Row], parquet: Path) -> str:
    """Write the rows, and make the page's tables of them."""
    if not rows:
        return "No runs yet."
    frame = pl.DataFrame(list(rows), infer_schema_length=None)
    frame.write_parquet(parquet)
    parts: list[str] = []
    for (task, rate), some in sorted(frame.group_by("task", "rate"), key=lambda each: each[0]):
        parts += [f"### {task}, learning rate {rate:g}", "", _table(some.to_dicts()), ""]
    return "\n".join(parts).rstrip()


def _table(rows: Sequence[Row]) -> str:
    arms: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(row)
    least = {
        key: {
            seed: min(each[seed][-1].get(key) or math.inf for each in arms.values() if seed in each)
            for seed in {seed for each in arms.values() for seed in each}
        }
        for key in ("tokens", "decode_steps")
    }
    lines = [
        "| arm | seeds | accuracy: equal prompts | - off | equal tokens, - off "
        "| equal decode steps, - off | greedy | truncated | length | entropy | kept/true "
        "| stale (longest) | oldest | decode steps / off | decoded / kept |",
        "|---|" + "--:|" * 14,
    ]
    whole = {
        arm: {seed: each for seed, each in runs.items() if each[-1].get("accuracy") is not None}
        for arm, runs in arms.items()
    }
    for arm, runs in whole.items():
        if runs:
            lines.append(_line(arm, len(arms[arm]), runs, whole.get(BASE, {}), least))
    return "\n".join(lines)


def _line(
    arm: str,
    count: int,
    runs: Mapping[int, Sequence[Row]],
    base: Mapping[int, Sequence[Row]],
    least: Mapping[str, Mapping[int, float]],
) -> str:
    ends = [each[-1] for each in runs.values()]
    paired = [seed for seed in runs if seed in base]
    equal = {
        key: [_at(runs[s], key, least[key][s]) - _at(base[s], key, least[key][s]) for s in paired]
        for key in least
    }
    final = [runs[s][-1]["accuracy"] - base[s][-1]["accuracy"] for s in paired]
    steps = [runs[s][-1]["decode_steps"] / base[s][-1]["decode_steps"] for s in paired]
    seeds = str(len(runs)) if len(runs) == count else f"{len(runs)} of {count}"
    cells = [
        arm,
        seeds,
        _spread([end["accuracy"] for end in ends]),
        *(
            "" if arm == BASE else _interval(each)
            for each in (final, equal["tokens"], equal["decode_steps"])
        ),
        *(
            _mean(ends, key, form)
            for key, form in (
                ("greedy", ".3f"),
                ("truncated", ".1%"),
                ("length", ".0f"),
                ("entropy", ".2f"),
                ("kept_vs_true", ".2f"),
            )
        ),
        f"{_mean(ends, 'stale', '.0%')} ({_mean(ends, 'stale_long', '.0%')})"
        if ends[0].get("stale") is not None
        else "",
        str(max(end["oldest"] or 0 for end in ends)),
        f"{statistics.fmean(steps):.2f}" if steps else "",
        f"{statistics.fmean(end['decoded'] / end['kept'] for end in ends):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _at(rows: Sequence[Row], key: str, amount: float) -> float:
    """Accuracy when so much of ``key`` was spent, between the evaluations beside it."""
    for before, after in pairwise(rows):
        if after[key] >= amount:
            share = (amount - before[key]) / max(1, after[key] - before[key])
            return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])
    return rows[-1]["accuracy"]


def _interval(values: Sequence[float]) -> str:
    """Mean and the 95% interval of differences that are paired by seed."""
    if len(values) < 2:
        return f"{values[0]:+.3f}" if values else ""
    half = _T95[min(len(values) - 1, 9)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.3f} ± {half:.3f}"


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{statistics.fmean(values):.3f} ({low:.2f} to {high:.2f})"


def _mean(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return format(statistics.fmean(values), form) if values else ""
