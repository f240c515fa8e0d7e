"""What pages say of the study: every number of these blocks is computed from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from accuracy_tables import (
    BASE,
    Arms,
    Difference,
    Row,
    Value,
    difference,
    last,
    plain_of,
    pooled,
    told,
    whole,
)

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
        "README.md": _together(tasks),
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
        "95% intervals over seeds; tasks are weighted by their inverse variances. The comparison",
        "at the end was not planned. Means of single tasks whose interval holds no zero:",
        f"{', '.join(apart) or 'none'}.",
        *([f"`race` kept {min(kept):.2f} to {max(kept):.2f} of the true length."] if kept else []),
        f"`partial` with `stale_tokens: fresh` collapsed in {_collapsed(tasks, fresh)}, with the",
        f"ratio to the sampler in {_collapsed(tasks, ratio)}.",
    ]


def _collapsed(tasks: Tasks, arms: Sequence[str]) -> str:
    runs = [rows for each in tasks.values() for arm in arms for rows in each.get(arm, {}).values()]
    return f"{sum(last(rows) < last(rows[:1]) for rows in runs)} of {len(runs)} runs"
