"""Runs experiments for real, small, on this machine's CPU, and writes ``<figure>/cpu.md``.

    python experiments/run_cpu.py [FIGURE ...] [--repeats N] [KEY.SUB=VALUE ...]

Without figures, all of them; ``fig9`` writes fig8 and fig10 too, which are views of the same runs.
Overrides are those of ``rollpacker train`` and hold for all arms; ``--arm``, once or more, leaves
out the others.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from cpu_runs import (
    HERE,
    Experiment,
    Run,
    command,
    experiments,
    make_model,
    model_of,
    run_arms,
    runs_there,
)
from cpu_tables import VIEWS


def main() -> None:
    known = experiments()
    own = [name for name, one in known.items() if one.arms]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="FIGURE | KEY.SUB=VALUE")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arm", action="append", help="only this one")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="of the runs")
    parser.add_argument("--pages", type=Path, default=HERE, help="of <figure>/cpu.md")
    parser.add_argument("--again", action="store_true", help="write the pages of runs made earlier")
    parser.add_argument("--models", action="store_true", help="make the models and stop")
    given = parser.parse_intermixed_args()
    overrides = [word for word in given.words if "=" in word]
    chosen = [word for word in given.words if "=" not in word] or own
    if unknown := sorted(set(chosen) - set(own)):
        parser.error(f"no runs of {unknown[0]}: choose from {', '.join(own)}")
    os.chdir(HERE.parent)
    for name in chosen:
        experiment = known[name].only(given.arm)
        model = model_of(experiment, given.out / "models")
        if not given.again:
            make_model(model, say)
        if given.models:
            continue
        about = given.out / f"{name}.txt"
        if given.again:
            runs = runs_there(experiment, given.out)
        else:
            before = Before()
            runs = list(run_arms(experiment, given.out, model, given.repeats, overrides))
            size = f"{given.repeats} times {runs[0].summary['steps']} steps of each arm"
            about.write_text(before.about(size), encoding="utf-8")
        for view in known.values():
            if name in (view.name, view.runs):
                write(given.pages, view, experiment, runs, about.read_text(encoding="utf-8"))


class Before:
    """The time, the CPU time and the load before some runs."""

    def __init__(self) -> None:
        self._began, self._cpu, self._load = time.monotonic(), cpu_seconds(), os.getloadavg()[0]

    def about(self, size: str) -> str:
        """What was run where, and what it took."""
        spent = f"{time.monotonic() - self._began:.0f} s, {cpu_seconds() - self._cpu:.0f} CPU s"
        where = f"{machine()}; {date.today()}, load before: {self._load:.1f}"
        busy = " The machine was busy: seconds and gains in seconds say little."
        return f"{where}. {size}: {spent}.{busy * (self._load > 1)}"


def write(
    pages: Path, view: Experiment, experiment: Experiment, runs: Sequence[Run], about: str
) -> None:
    """Write and print what one figure reads from the runs."""
    result = [f"# {view.title}, on a CPU", "", about, "", *VIEWS[view.name](runs), ""]
    lines = [
        *result,
        view.shows,
        "",
        *arms_of(experiment),
        "",
        f"*Generated from real runs by `python experiments/run_cpu.py {experiment.name}`.*",
        "",
    ]
    path = pages / view.name / "cpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(result))
    say(f"written: {path}")


def arms_of(experiment: Experiment) -> list[str]:
    """Each arm's command, to run it alone."""
    lines = ["Each arm alone:", "", "```bash"]
    for name, arm in experiment.arms.items():
        lines += [f"# {name}{f': {arm.about}' if arm.about else ''}", command(experiment, arm)]
    return [*lines, "```"]


def machine() -> str:
    """The CPU's name and cores."""
    names: Mapping[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        pairs = (line.partition(":") for line in info.read_text(encoding="utf-8").splitlines())
        names = {key.strip(): name.strip() for key, _, name in pairs}
    return f"{names.get('model name', 'CPU')}, {os.cpu_count()} cores, no GPU"


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
