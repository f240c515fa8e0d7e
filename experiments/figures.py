"""The paper's tables and figures: simulated, and small for real on this machine's CPU.

    python experiments/figures.py simulate [--seeds N]
    python experiments/figures.py cpu [FIGURE ...] [--repeats N] [KEY.SUB=VALUE ...]
    python experiments/figures.py pages

``simulate`` writes docs/reproduction.md and a folder a figure from ``rollpacker reproduce all``,
missed rows too. ``cpu`` runs the arms of figures, all by default, and writes ``<figure>/cpu.md``:
medians over repetitions, ratios medians of the ratios within one. ``fig9`` writes fig8 and fig10
too, views of the same runs. Overrides are those of ``rollpacker train`` and hold for all arms.
``pages`` writes what the pages say of the runs on a CPU and on GPUs, as ``simulate`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from xml.sax.saxutils import escape

import yaml

from rollpacker.cli.simulate.reproduce import reproduce_rows
from rollpacker.config import load
from rollpacker.sim import reproduce
from rollpacker.sim.reproduce import FIGURES, ResultRow, within

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reproduction.md"
TRAINED_STEPS = 30
"""GRPO steps between the two models: after the warm start, and with lengths that training gives."""


# The arms of the experiments, and what a run on a CPU leaves.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison.

    Args:
        set: ``key.sub=value`` overrides, the same on a CPU and on GPUs.
        cpu: further ones, of the CPU run alone.
        about: what it is, where its name does not say it.
    """

    set: Sequence[str] = ()
    cpu: Sequence[str] = ()
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """``arms.yaml`` of a figure.

    Args:
        arms: by name; the first one is what the others are compared with.
        runs: the figure whose runs it is a view of; its own by default.
        shows: what the CPU runs show and where they miss the paper's.
    """

    name: str
    title: str
    shows: str = ""
    arms: Mapping[str, Arm] = field(default_factory=dict[str, Arm])
    runs: str = ""

    def only(self, names: Sequence[str] | None) -> Experiment:
        """With these arms alone; all when there are none. Raises ``SystemExit`` on a wrong name."""
        if unknown := sorted(set(names or ()) - set(self.arms)):
            raise SystemExit(f"{self.name} has no arm '{unknown[0]}': {', '.join(self.arms)}")
        kept = {name: arm for name, arm in self.arms.items() if not names or name in names}
        return replace(self, arms=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: its arm, the number of its repetition and what it left.

    ``streamed``: share of the tokens with a gradient whose work was begun before the rollout's end.
    """

    arm: str
    number: int
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    streamed: float

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Its rounds of these kinds, or all, without the first, in which code is compiled."""
        return [s for s in self.steps[1:] if not kinds or s["tail/round_kind"] in kinds]

    def mean(self, key: str, *kinds: str) -> float:
        """Mean of a metric over rounds; NaN when there is none."""
        values = [step[key] for step in self.of(*kinds)]
        return statistics.fmean(values) if values else float("nan")


def experiments() -> dict[str, Experiment]:
    """All figures that have arms, by name, in the paper's order."""
    paths = sorted(HERE.glob("*/arms.yaml"), key=lambda p: (len(p.parent.name), p.parent.name))
    found: dict[str, Experiment] = {}
    for path in paths:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        arms = {name: Arm(**arm) for name, arm in tree.pop("arms", {}).items()}
        found[path.parent.name] = Experiment(name=path.parent.name, arms=arms, **tree)
    return found


def make_model(model: Path) -> None:
    """Make ``warm`` or ``trained`` if it is not there, in less than a minute each."""
    from rollpacker.demo.run import Size, demo_config
    from rollpacker.demo.warm_start import default_cache, warm_start
    from rollpacker.job import train

    warm = model.with_name("warm")
    if not warm.exists():
        say("warm start of the demo's model (kept in a cache)")
        shutil.copytree(warm_start(default_cache()), warm)
    if not model.exists():
        say(f"{TRAINED_STEPS} steps of GRPO, for lengths as training makes them")
        run = model.with_name("run")
        config = demo_config(warm, run, "off", Size(steps=TRAINED_STEPS, held_out=50))
        train(config.model_copy(update={"eval": None}))
        shutil.copytree(run / f"checkpoint-{TRAINED_STEPS}", model)


def run_arms(
    experiment: Experiment, model: Path, arguments: argparse.Namespace, overrides: Sequence[str]
) -> str:
    """Every arm ``repeats`` times, one after the other; every other time in reverse.

    The runs of one repetition have one seed: the same prompts in the same order. Returns what was
    run where, and what it took.
    """
    from rollpacker.job import train

    began, before, load_before = time.monotonic(), cpu_seconds(), os.getloadavg()[0]
    path, out = HERE / experiment.name / "cpu.yaml", arguments.out
    shutil.rmtree(out / experiment.name, ignore_errors=True)
    for number in range(arguments.repeats):
        for name in list(experiment.arms)[:: -1 if number % 2 else 1]:
            arm, place = experiment.arms[name], run_folder(experiment, out, number, name)
            own = [f"model.path={model}", f"output={place}", f"seed={number}"]
            train(load(path, [*arm.set, *arm.cpu, *own, *overrides]))
    steps = runs_there(experiment, out)[0].summary["steps"]
    spent = f"{time.monotonic() - began:.0f} s, {cpu_seconds() - before:.0f} CPU s"
    busy = " The machine was busy: seconds and gains in seconds say little."
    return (
        f"{machine()}; {date.today()}, load before: {load_before:.1f}. {arguments.repeats} times "
        f"{steps} steps of each arm: {spent}.{busy * (load_before > 1)}"
    )


def runs_there(experiment: Experiment, out: Path) -> list[Run]:
    """Those of ``run_arms``."""
    found: list[Run] = []
    for number in range(len(list((out / experiment.name).iterdir()))):
        for name in experiment.arms:
            place = run_folder(experiment, out, number, name)
            if (place / "summary.json").exists():
                found.append(finished(name, number, place))
    return found


def run_folder(experiment: Experiment, out: Path, number: int, arm: str) -> Path:
    """Where one repetition of an arm is."""
    slug = "".join(c if c.isalnum() or c == "." else "-" for c in arm)
    return out / experiment.name / f"{number}-{slug}"


def finished(arm: str, number: int, folder: Path) -> Run:
    """What a run has left."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(
        arm=arm,
        number=number,
        summary=json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        steps=[json.loads(x) for x in lines],
        streamed=streamed(folder / "journal.jsonl"),
    )


def streamed(journal: Path) -> float:
    """Share of a run's gradient tokens that were given to workers before a rollout's end."""
    tokens: dict[int, int] = {}
    lengths: dict[str, list[int]] = {}
    given = {True: 0, False: 0}
    over = False
    for entry in map(json.loads, journal.read_text(encoding="utf-8").splitlines()[1:]):
        event = entry["event"]
        over = over and event["kind"] != "StepStarted"
        if event["kind"] == "AttemptFinished":
            tokens[event["attempt"]] = event["tokens"]
        for made in entry["decisions"]:
            if made["kind"] == "AcceptGroup":
                counted = [tokens[one] for one in made["attempts"]]
                lengths[made["prompt"]] = counted if made["informative"] else []
            elif made["kind"] == "AccumulateGradients":
                for part in made["parts"]:
                    given[over] += sum(lengths[part["prompt"]][part["start"] : part["stop"]])
            over = over or made["kind"] == "FinishRollout"
    return given[False] / max(1, sum(given.values()))


# What the CPU runs of a figure show, beside the paper's values.

Runs = Sequence[Run]
Measure = Callable[[Run], float]
Cell = Callable[[Runs, str], str]
"""Of all runs and an arm."""
_FULL = ("full", "short")


def metric(key: str, *kinds: str) -> Measure:
    """Mean of a metric over a run's rounds."""
    return lambda run: run.mean(key, *kinds)


def value(measure: Measure, form: str) -> Cell:
    """The median of an arm's repetitions."""
    return lambda runs, arm: text(statistics.median(of(runs, arm, measure)), form)


def gain(measure: Measure) -> Cell:
    """By how much the first arm has more."""

    def cell(runs: Runs, arm: str) -> str:
        first, mine = of(runs, runs[0].arm, measure), of(runs, arm, measure)
        ratios = [a / b for a, b in zip(first, mine, strict=True)]
        return text(statistics.median(ratios), "{:.2f}x")

    return cell


def given(values: Mapping[str, str]) -> Cell:
    """Known cells."""
    return lambda _, arm: values.get(arm, "")


def of(runs: Runs, arm: str, measure: Measure) -> list[float]:
    """An arm's values, by repetition."""
    mine = sorted((run for run in runs if run.arm == arm), key=lambda run: run.number)
    return [measure(run) for run in mine]


def text(number: float, form: str) -> str:
    """A cell; empty where there is no value."""
    return form.format(number) if number == number else ""


rollout_s = metric("timing_s/rollout")
decode_steps = metric("engine/steps")
WORK: Mapping[str, Cell] = {
    "decode steps": value(decode_steps, "{:.0f}"),
    "decode steps, gain": gain(decode_steps),
    "tokens decoded": value(metric("engine/generated_tokens"), "{:,.0f}"),
    "CPU s": value(metric("timing_s/worker_cpu"), "{:.3f}"),
}
"""What does not drift, or hardly: a step's mean. Decode steps are of the worker with the most."""
STEP: Mapping[str, Cell] = {
    "step s": value(metric("step_time"), "{:.3f}"),
    "step s, gain": gain(metric("step_time")),
    "rollout s": value(rollout_s, "{:.3f}"),
}
IDLE: Mapping[str, Cell] = {"idle": value(metric("bubble/total"), "{:.0%}")}


def accuracy(runs: Runs) -> dict[str, Cell]:
    """Figure 8a."""
    after = [n for n, step in enumerate(runs[0].steps, 1) if "eval/sampled_accuracy" in step]

    def at(count: int) -> Measure:
        if count == 0:
            return lambda run: run.summary["before"]["eval/sampled_accuracy"]
        return lambda run: run.steps[count - 1]["eval/sampled_accuracy"]

    def truncated(run: Run) -> float:
        return run.summary["after"]["eval/sampled_clipped_ratio"]

    return {
        **{f"step {count}": value(at(count), "{:.3f}") for count in (0, *after)},
        "truncated at the end": value(truncated, "{:.1%}"),
        "seconds of training": value(lambda run: run.summary["timing_s"]["steps"], "{:.1f}"),
        "decode steps": value(lambda run: run.summary["decode_steps"], "{:,.0f}"),
    }


def end_to_end(_: Runs) -> dict[str, Cell]:
    """Figure 9."""
    paper = {"synchronous": "1.00x", "RollPacker": f"{reproduce.FIG9['8k'][0]:.2f}x"}
    kept = value(lambda run: run.summary["tail"]["kept_vs_true_len"], "{:.2f}")
    return {**WORK, **STEP, **IDLE, "kept/true length": kept, "paper, 7B/8k": given(paper)}


def by_round(_: Runs) -> dict[str, Cell]:
    """Figure 10."""
    columns: dict[str, Cell] = {}
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
    return columns | {"paper, 8k 16k 32k": given({"RollPacker": paper})}


def long_run(key: str) -> Measure:
    """Mean over rounds; long rounds weigh what they do in a long run."""

    def measure(run: Run) -> float:
        share = 1.0 - 1.0 / reproduce.FIG11_ETAS[run.arm][0]
        if share == 0.0:
            return run.mean(key)
        return share * run.mean(key, "long") + (1.0 - share) * run.mean(key, "short")

    return measure


def sensitivity(_: Runs) -> dict[str, Cell]:
    """Figure 11."""

    def longest(run: Run) -> float:
        return max(step["engine/steps"] for step in run.of(*_FULL))

    def paper(bars: Sequence[float]) -> Cell:
        pairs = zip(reproduce.FIG11_ETAS, bars, strict=True)
        return given({name: f"{bars[0] / bar:.2f}x" for name, bar in pairs})

    steps, seconds = long_run("engine/steps"), long_run("timing_s/rollout")
    columns: dict[str, Cell] = {
        "decode steps": value(steps, "{:.0f}"),
        "gain": gain(steps),
        "longest short round": value(longest, "{:.0f}"),
        "its gain": gain(longest),
        "tokens decoded": value(long_run("engine/generated_tokens"), "{:,.0f}"),
        "rollout CPU s": value(long_run("timing_s/decode_cpu"), "{:.3f}"),
        "rollout s": value(seconds, "{:.3f}"),
        "rollout s, gain": gain(seconds),
    }
    return columns | {f"paper, {name}": paper(bars) for name, bars in reproduce.FIG11.items()}


def stream_trainer(_: Runs) -> dict[str, Cell]:
    """Table 3."""
    paper = {**reproduce.TABLE3, "adaptive": reproduce.ADAPTIVE}
    return {
        **WORK,
        **STEP,
        "after it, s": value(metric("timing_s/train"), "{:.3f}"),
        "gradients begun before its end": value(lambda run: run.streamed, "{:.0%}"),
        **IDLE,
        "paper, 7B/8k": given({n: f"{paper['none'] / s:.2f}x" for n, s in paper.items()}),
    }


def rewards(_: Runs) -> dict[str, Cell]:
    """Figure 13c."""
    program = value(lambda run: 1e3 * run.mean("rewards/seconds/mean"), "{:.2f}")
    wait = value(metric("timing_s/grade_wait"), "{:.3f}")
    return {
        "decode steps": value(decode_steps, "{:.0f}"),
        "CPU ms of a kept response's program": program,
        "wait for rewards after the last response, s": wait,
        "rollout and rewards, s": value(rollout_s, "{:.3f}"),
        "gain": gain(rollout_s),
        "short or full rounds, s": value(metric("timing_s/rollout", *_FULL), "{:.3f}"),
        "reward": value(metric("reward"), "{:.3f}"),
    }


VIEWS: Mapping[str, Callable[[Runs], dict[str, Cell]]] = {
    "fig8": accuracy,
    "fig9": end_to_end,
    "fig10": by_round,
    "fig11": sensitivity,
    "fig13": rewards,
    "table3": stream_trainer,
}
"""Columns by figure."""


def view(name: str, runs: Runs) -> list[str]:
    """A table with a row for each arm."""
    columns = VIEWS[name](runs)
    arms = dict.fromkeys(run.arm for run in runs)
    rows = [[arm, *(cell(runs, arm) for cell in columns.values())] for arm in arms]
    lines = [["", *columns], ["---", *["--:"] * len(columns)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def cpu(arguments: argparse.Namespace, fail: Callable[[str], object]) -> None:
    """Run the arms of figures, and write and print what they show."""
    known = experiments()
    own = [name for name, one in known.items() if one.arms]
    overrides = [word for word in arguments.words if "=" in word]
    chosen = [word for word in arguments.words if "=" not in word] or own
    if unknown := sorted(set(chosen) - set(own)):
        fail(f"no runs of {unknown[0]}: choose from {', '.join(own)}")
    os.chdir(HERE.parent)
    for name in chosen:
        experiment = known[name].only(arguments.arm)
        model = arguments.out / "models" / Path(load(HERE / name / "cpu.yaml").model.path).name
        make_model(model)
        about = run_arms(experiment, model, arguments, overrides)
        runs = runs_there(experiment, arguments.out)
        for each in known.values():
            if name in (each.name, each.runs):
                write(arguments.pages, each, experiment, runs, about)


def write(pages: Path, shown: Experiment, experiment: Experiment, runs: Runs, about: str) -> None:
    """Write and print what one figure reads from the runs, with each arm's command."""
    result = [f"# {shown.title}, on a CPU", "", about, "", *view(shown.name, runs), ""]
    lines = [*result, shown.shows, "", "Each arm alone:", "", "```bash"]
    for name, arm in experiment.arms.items():
        words = shlex.join([f"experiments/{experiment.name}/cpu.yaml", *arm.set, *arm.cpu])
        lines += [f"# {name}{f': {arm.about}' if arm.about else ''}", f"rollpacker train {words}"]
    by = f"python experiments/figures.py cpu {experiment.name}"
    lines += ["```", "", f"*Generated from real runs by `{by}`.*", ""]
    path = pages / shown.name / "cpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(result))
    say(f"written: {path}")


def machine() -> str:
    """The CPU's name and cores."""
    info = Path("/proc/cpuinfo")
    told = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", told, re.MULTILINE) or ["CPU"]
    return f"{names[-1]}, {os.cpu_count()} cores, no GPU"


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def say(line: str) -> None:
    print(line, file=sys.stderr)


# What the simulation gives.

HEAD = """# Reproducing the papers

> **Limits.** The simulator has no GPU. Most agreement below was *fitted*: it shows that the costs
> are consistent, and not that we could predict the paper.

## RollPacker, simulated

`rollpacker reproduce all` simulates the experiments of
[RollPacker](https://arxiv.org/abs/2509.21009) with the policies of a real run on cost models.
`rollpacker reproduce fig9` simulates one of them. Each row has a status:

- **predicted**: no cost or length was fitted to this value.
- **fitted**: a constant was fitted to it, alone or with others. It stands in
  `src/rollpacker/sim/calibration/*.yaml`, or the row's note names it.
- **not reproduced**: our value is more than 10% away, or the simulator has no answer.

Length distributions were fitted to the paper's figures too. Rows without a value of the paper are
ours alone.
"""
FOOT = "\n*The text up to here is generated from a run by `experiments/figures.py`.*\n"
REAL = "## For real\n"
"""Starts what is said of the other two sides of an experiment."""
REAL_HEAD = """
The artifact's own experiments also run for real. `python experiments/figures.py cpu` runs small
ones on a CPU, with the demo's model. Nobody has run the configurations for GPUs.
`experiments/README.md` lists what they still need. These are the CPU runs:
"""
HAND = "## From paper to code\n"
"""Starts what is written by hand, at the end of the page."""
TREE = "https://github.com/rollpacker/rollpacker/tree/main/experiments"
COLOURS = {
    "paper": "#9aa5b1",
    "predicted": "#2b8a3e",
    "fitted": "#1c7ed6",
    "not_reproduced": "#e03131",
}


def simulate(seeds: int) -> None:
    """Simulate all figures and write their pages."""
    began = time.perf_counter()
    rows = reproduce_rows(list(FIGURES), seeds)
    wall = time.perf_counter() - began
    by_figure = {
        name: [row for row in rows if row.name.split("/")[0].startswith(name)] for name in FIGURES
    }
    for name, found in by_figure.items():
        write_folder(name, found)
    hand = PAGE.read_text(encoding="utf-8").partition(HAND)[2]
    PAGE.write_text(f"{page(by_figure, seeds, wall)}{HAND}{hand}", encoding="utf-8")


def write_sides() -> None:
    """Put what there is for real at the end of each page, in place of what is there."""
    for path, last in sides(experiments()).items():
        path.write_text(last, encoding="utf-8")


def sides(known: Mapping[str, Experiment]) -> dict[Path, str]:
    """Pages with what a figure's folder has besides the simulation, as they are to be."""
    overview = ["| experiment | result |", "|---|---|"]
    overview += [
        f"| {one.title} | [`{name}/cpu.md`]({TREE}/{name}/cpu.md) |" for name, one in known.items()
    ]
    last = "\n".join([REAL_HEAD, *overview, ""]) + FOOT
    found = {PAGE: _put(PAGE.read_text(encoding="utf-8"), last)}
    for name, one in known.items():
        path, runs = HERE / name / "README.md", one.runs or name
        at = "" if runs == name else f"../{runs}/"
        gpu = sorted(path.name for path in (HERE / runs).glob("gpu*.yaml"))
        last = (
            f"\n- On a CPU: [measured](cpu.md) by `python experiments/figures.py cpu {runs}`, from "
            f"[cpu.yaml]({at}cpu.yaml) and the overrides of [arms.yaml]({at}arms.yaml).\n"
            f"- On GPUs, not run yet: {', '.join(f'[{each}]({at}{each})' for each in gpu)} and the "
            "same overrides.\n"
        )
        head = f"# {one.title}\n\nNot simulated: costs do not learn.\n"
        found[path] = _put(path.read_text(encoding="utf-8") if name in FIGURES else head, last)
    return found


def _put(page: str, last: str) -> str:
    """A page with this as its last generated section."""
    made, hand, rest = page.partition(HAND)
    made = made.split(REAL)[0].removesuffix(FOOT).rstrip()
    return f"{made}\n\n{REAL}{last}{hand and chr(10)}{hand}{rest}"


def page(by_figure: dict[str, list[ResultRow]], seeds: int, wall: float) -> str:
    """The generated part of the documentation's page, up to what ran for real."""

    def agree(rows: Sequence[ResultRow]) -> str:
        return f"{within(rows)} of {sum(row.paper is not None for row in rows)}"

    every = [row for found in by_figure.values() for row in found]
    lines = [
        HEAD,
        f"{agree(every)} values are within 10% of the paper's, over {seeds} seeds, "
        f"simulated in {wall:.0f} s.",
        "",
        "| experiment, with all its rows | within 10% |",
        "|---|--:|",
    ]
    for name, found in by_figure.items():
        title = f"{FIGURES[name].title} (`{name}`)"
        lines.append(f"| [{title}]({TREE}/{name}) | {agree(found)} |")
    return "\n".join([*lines, "", ""])


def table(rows: Sequence[ResultRow]) -> list[str]:
    """Rows as a Markdown table; a note of several rows stands once, below it."""
    counts = Counter(row.note for row in rows if row.note)
    shared = [note for note, count in counts.items() if 1 < count < len(rows)]
    letters = dict(zip(shared, ascii_lowercase, strict=False))
    every = [note for note, count in counts.items() if count == len(rows) > 1]
    marks = letters | dict.fromkeys(every, "")
    notes = [marks.get(row.note, row.note) for row in rows]
    lines = ["| value | paper | ours | error | status |", "|---|--:|--:|--:|---|"]
    if any(notes):
        lines = [f"{lines[0]} note |", f"{lines[1]}---|"]
    for row, note in zip(rows, notes, strict=True):
        error = "" if row.relative_error is None else f"{row.relative_error:+.0%}"
        cells = [row.name.split("/", 1)[1], number(row.paper), number(row.ours), error]
        cells += [row.status.replace("_", " "), *[note] * any(notes)]
        lines.append(f"| {' | '.join(cells)} |")
    below = [f"- **{letter}**: {note}" for note, letter in letters.items()]
    below += [f"- all rows: {note}" for note in every]
    return [*lines, "", *below] if below else lines


def number(value: float | None) -> str:
    """Three digits that count."""
    return "" if value is None else f"{value:.3g}"


def write_folder(name: str, rows: Sequence[ResultRow]) -> None:
    """README, plot and the configuration of one simulated job."""
    folder, figure = HERE / name, FIGURES[name]
    folder.mkdir(exist_ok=True)
    label, job = list(figure.jobs().items())[-1]
    lines = [f"# {figure.title}", "", "```bash", f"rollpacker reproduce {name}", "```", ""]
    lines += [
        f"`config.yaml` is one of its jobs (`{label}`): `rollpacker simulate config.yaml`.",
        "",
        "![ours beside the paper's](plot.svg)",
        "",
        *table(rows),
        "",
        "*Generated from a run by `experiments/figures.py`.*",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    config = yaml.safe_dump(job.config, sort_keys=False)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "plot.svg").write_text(plot(rows), encoding="utf-8")


def plot(rows: Sequence[ResultRow]) -> str:
    """Bars of the paper's values and ours, on one scale."""
    top = max((v for row in rows for v in (row.paper, row.ours) if v is not None), default=1.0)
    height = 34 * len(rows) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, row in enumerate(rows):
        y = 10 + 34 * place
        parts.append(f'<text x="8" y="{y + 18}">{escape(row.name.split("/", 1)[1])}</text>')
        bars = ((0, row.paper, COLOURS["paper"]), (14, row.ours, COLOURS[row.status]))
        for offset, value, colour in bars:
            if value is None:
                continue
            width = 460 * value / top
            parts.append(
                f'<rect x="300" y="{y + offset}" width="{width:.1f}" height="12" fill="{colour}"/>'
                f'<text x="{306 + width:.1f}" y="{y + offset + 10}">{number(value)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("simulate", "cpu", "pages"))
    parser.add_argument("words", nargs="*", metavar="FIGURE | KEY.SUB=VALUE")
    parser.add_argument("--seeds", type=int, default=2, help="of what is simulated")
    parser.add_argument("--repeats", type=int, default=2, help="of each arm")
    parser.add_argument("--arm", action="append", help="only this one")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="of the runs")
    parser.add_argument("--pages", type=Path, default=HERE, help="of <figure>/cpu.md")
    arguments = parser.parse_intermixed_args()
    if arguments.command == "cpu":
        cpu(arguments, parser.error)
        return
    if arguments.command == "simulate":
        simulate(arguments.seeds)
    write_sides()


if __name__ == "__main__":
    main()
