"""What the CPU runs of a figure show, as Markdown tables beside the paper's values.

Values are medians over repetitions; ratios are medians of the ratios within a repetition.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from cpu_runs import Run

from rollpacker.sim import reproduce

Runs = Sequence[Run]
Measure = Callable[[Run], float]
Columns = Mapping[str, Callable[[Runs, str], str]]
"""Cells by heading: of all runs and an arm."""

_FULL = ("full", "short")


def metric(key: str, *kinds: str) -> Measure:
    """Mean of a metric over a run's rounds."""
    return lambda run: run.mean(key, *kinds)


step_s = metric("step_time")
rollout_s = metric("timing_s/rollout")
decode_steps = metric("engine/steps")
decoded = metric("engine/generated_tokens")
cpu_s = metric("timing_s/worker_cpu")


def value(measure: Measure, form: str) -> Callable[[Runs, str], str]:
    """The median of an arm's repetitions."""
    return lambda runs, arm: text(statistics.median(of(runs, arm, measure)), form)


def gain(measure: Measure) -> Callable[[Runs, str], str]:
    """By how much the first arm has more."""

    def cell(runs: Runs, arm: str) -> str:
        first, mine = of(runs, runs[0].arm, measure), of(runs, arm, measure)
        ratios = [a / b for a, b in zip(first, mine, strict=True)]
        return text(statistics.median(ratios), "{:.2f}x")

    return cell


def given(values: Mapping[str, str]) -> Callable[[Runs, str], str]:
    """Known cells."""
    return lambda _, arm: values.get(arm, "")


def of(runs: Runs, arm: str, measure: Measure) -> list[float]:
    """An arm's values, by repetition."""
    mine = sorted((run for run in runs if run.arm == arm), key=lambda run: run.number)
    return [measure(run) for run in mine]


def text(number: float, form: str) -> str:
    """A cell; empty where there is no value."""
    return form.format(number) if number == number else ""


def table(runs: Runs, columns: Columns) -> list[str]:
    """A row for each arm."""
    names = dict.fromkeys(run.arm for run in runs)
    rows = [[arm, *(cell(runs, arm) for cell in columns.values())] for arm in names]
    head = ["", *columns]
    return [line(head), line(["---", *["--:"] * len(columns)]), *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


WORK: Columns = {
    "decode steps": value(decode_steps, "{:.0f}"),
    "decode steps, gain": gain(decode_steps),
    "tokens decoded": value(decoded, "{:,.0f}"),
    "CPU s": value(cpu_s, "{:.3f}"),
}
"""What does not drift, or hardly: a step's mean. Decode steps are of the worker with the most."""


def end_to_end(runs: Runs) -> list[str]:
    """Figure 9."""
    paper = {"synchronous": "1.00x", "RollPacker": f"{reproduce.FIG9['8k'][0]:.2f}x"}
    bias: Measure = lambda run: run.summary["tail"]["kept_vs_true_len"]  # noqa: E731
    columns: Columns = {
        **WORK,
        "step s": value(step_s, "{:.3f}"),
        "step s, gain": gain(step_s),
        "rollout s": value(rollout_s, "{:.3f}"),
        "idle": value(metric("bubble/total"), "{:.0%}"),
        "kept/true length": value(bias, "{:.2f}"),
        "paper, 7B/8k": given(paper),
    }
    return table(runs, columns)


def accuracy(runs: Runs) -> list[str]:
    """Figure 8a."""
    after = [n for n, step in enumerate(runs[0].steps, 1) if "eval/sampled_accuracy" in step]

    def at(count: int) -> Measure:
        if count == 0:
            return lambda run: run.summary["before"]["eval/sampled_accuracy"]
        return lambda run: run.steps[count - 1]["eval/sampled_accuracy"]

    columns: dict[str, Callable[[Runs, str], str]] = {
        f"step {count}": value(at(count), "{:.3f}") for count in (0, *after)
    }
    columns["truncated at the end"] = value(
        lambda run: run.summary["after"]["eval/sampled_clipped_ratio"], "{:.1%}"
    )
    columns["seconds of training"] = value(lambda run: run.summary["timing_s"]["steps"], "{:.1f}")
    columns["decode steps"] = value(lambda run: run.summary["decode_steps"], "{:,.0f}")
    return table(runs, columns)


def by_round(runs: Runs) -> list[str]:
    """Figure 10."""
    columns: dict[str, Callable[[Runs, str], str]] = {}
    for name, key, form in (
        ("decode steps", "engine/steps", "{:.0f}"),
        ("tokens decoded", "engine/generated_tokens", "{:,.0f}"),
        ("step s", "step_time", "{:.3f}"),
    ):
        columns[f"{name}, short or full"] = value(metric(key, *_FULL), form)
        columns[f"{name}, long"] = value(metric(key, "long"), form)

    def ratio(run: Run) -> float:
        return run.mean("engine/steps", "long") / run.mean("engine/steps", *_FULL)

    columns["long over short, decode steps"] = value(ratio, "{:.2f}x")
    paper = " ".join(f"{long / short:.2f}x" for short, long in reproduce.FIG10.values())
    columns["paper, 8k 16k 32k"] = given({"RollPacker": paper})
    return table(runs, columns)


def long_run(key: str, etas: Mapping[str, tuple[float, float]]) -> Measure:
    """Mean over rounds; long rounds weigh what they do in a long run."""

    def measure(run: Run) -> float:
        share = 1.0 - 1.0 / etas[run.arm][0]
        if share == 0.0:
            return run.mean(key)
        return share * run.mean(key, "long") + (1.0 - share) * run.mean(key, "short")

    return measure


def sensitivity(runs: Runs) -> list[str]:
    """Figure 11."""

    def longest(run: Run) -> float:
        return max(step["engine/steps"] for step in run.of(*_FULL))

    def paper(bars: Sequence[float]) -> Mapping[str, str]:
        return {
            n: f"{bars[0] / bar:.2f}x" for n, bar in zip(reproduce.FIG11_ETAS, bars, strict=True)
        }

    steps, seconds = (
        long_run(k, reproduce.FIG11_ETAS) for k in ("engine/steps", "timing_s/rollout")
    )
    columns: dict[str, Callable[[Runs, str], str]] = {
        "decode steps": value(steps, "{:.0f}"),
        "gain": gain(steps),
        "longest short round": value(longest, "{:.0f}"),
        "its gain": gain(longest),
        "tokens decoded": value(
            long_run("engine/generated_tokens", reproduce.FIG11_ETAS), "{:,.0f}"
        ),
        "rollout CPU s": value(long_run("timing_s/decode_cpu", reproduce.FIG11_ETAS), "{:.3f}"),
        "rollout s": value(seconds, "{:.3f}"),
        "rollout s, gain": gain(seconds),
    }
    for setting, bars in reproduce.FIG11.items():
        columns[f"paper, {setting}"] = given(paper(bars))
    return table(runs, columns)


def stream_trainer(runs: Runs) -> list[str]:
    """Table 3."""
    paper = {**reproduce.TABLE3, "adaptive": reproduce.ADAPTIVE}
    columns: Columns = {
        **WORK,
        "step s": value(step_s, "{:.3f}"),
        "step s, gain": gain(step_s),
        "rollout s": value(rollout_s, "{:.3f}"),
        "after it, s": value(metric("timing_s/train"), "{:.3f}"),
        "gradients begun before its end": value(lambda run: run.streamed, "{:.0%}"),
        "idle": value(metric("bubble/total"), "{:.0%}"),
        "paper, 7B/8k": given({n: f"{paper['none'] / s:.2f}x" for n, s in paper.items()}),
    }
    return table(runs, columns)


def rewards(runs: Runs) -> list[str]:
    """Figure 13c."""
    columns: Columns = {
        "decode steps": value(decode_steps, "{:.0f}"),
        "CPU ms of a kept response's program": value(
            lambda run: 1e3 * run.mean("rewards/seconds/mean"), "{:.2f}"
        ),
        "wait for rewards after the last response, s": value(
            metric("timing_s/grade_wait"), "{:.3f}"
        ),
        "rollout and rewards, s": value(rollout_s, "{:.3f}"),
        "gain": gain(rollout_s),
        "short or full rounds, s": value(metric("timing_s/rollout", *_FULL), "{:.3f}"),
        "reward": value(metric("reward"), "{:.3f}"),
    }
    return table(runs, columns)


VIEWS: Mapping[str, Callable[[Runs], list[str]]] = {
    "fig8": accuracy,
    "fig9": end_to_end,
    "fig10": by_round,
    "fig11": sensitivity,
    "fig13": rewards,
    "table3": stream_trainer,
}
"""By figure."""
