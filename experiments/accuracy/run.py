"""Accuracy by mode: trains every arm of the study on every task, and writes the page.

    python experiments/accuracy/run.py [TASK ...] [--seeds N] [--jobs 2] [--page] [--check]

``--model TASK=FOLDER`` gives a task another model's folder than its configuration does.
Runs that are there, as folders or as rows of ``results.parquet`` with the same settings, are not
made again, so the command goes on where it was stopped. ``--page`` only writes ``results.parquet``,
``plot.svg`` and what pages say of the study from what is there; ``--check`` compares it with them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from accuracy_results import (
    blocks,
    comparisons,
    curve,
    finished,
    kept,
    key_of,
    picture,
    put,
    tables,
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.parquet"
MARK = "<!-- tables -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    task: str
    config: str
    rate: float
    seed: int
    arm: str
    set: Sequence[str]
    model: str = ""
    """Another folder than the configuration's."""

    @property
    def about(self) -> dict[str, Any]:
        """What tells its rows from those of others, and of the same run with other settings."""
        config = yaml.safe_load(Path(self.config).read_text(encoding="utf-8"))
        made_of = json.dumps([config, list(self.set)], sort_keys=True)
        return {
            "task": self.task,
            "rate": self.rate,
            "seed": self.seed,
            "arm": self.arm,
            "settings": hashlib.sha256(made_of.encode()).hexdigest()[:12],
        }

    def folder(self, out: Path) -> Path:
        """Where it is."""
        slug = "".join(c if c.isalnum() or c == "." else "-" for c in self.arm)
        name = f"{self.seed}-{slug}-{self.about['settings']}"
        return out / self.task / f"{self.rate:g}" / name

    def train(self, out: Path) -> str:
        """Run it, in a process of its own; what went wrong, or nothing."""
        folder = self.folder(out)
        began = any(folder.glob("checkpoint-*"))
        if folder.exists() and not began:
            shutil.rmtree(folder)
        own = [f"seed={self.seed}", f"train.learning_rate={self.rate}", f"output={folder}"]
        words = [self.config, *self.set, *own]
        words += [f"model.path={self.model}"] if self.model else []
        words += ["--resume", "auto"] if began else []
        command = [sys.executable, "-m", "rollpacker", "train", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode in (130, 143) or done.returncode < 0:
            return "stopped"  # by whoever started it: it goes on the next time
        if done.returncode:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "failed.txt").write_text(done.stderr, encoding="utf-8")
            return done.stderr.strip().splitlines()[-1]
        return ""


def trials(
    study: dict[str, Any], tasks: Sequence[str], seeds: int | None, models: Mapping[str, str]
) -> Iterator[Trial]:
    """All of them, whole comparisons first: seed by seed, then the arms that have few seeds."""
    plans = {name: study["tasks"][name] for name in study["tasks"] if name in tasks}
    few: dict[str, int] = study["few_seeds"]
    most = range(seeds or max(plan["seeds"] for plan in plans.values()))
    for later, seed, (name, plan) in itertools.product((False, True), most, plans.items()):
        planned = seeds or plan["seeds"]
        for arm, words in study["arms"].items():
            left_out = arm in plan.get("without", ()) or seed >= min(few.get(arm, planned), planned)
            if left_out or (arm in few) is not later:
                continue
            yield Trial(
                task=name,
                config=plan["config"],
                rate=plan["rate"],
                seed=seed,
                arm=arm,
                set=[*plan.get("set", ()), *words],
                model=models.get(name, ""),
            )


def make_models(out: Path, tasks: Sequence[str]) -> None:
    """The warm starts that the small ones of these begin with, in minutes."""
    from rollpacker.demo.warm_start import Recipe, default_cache, warm_start

    for name, recipe in {"gcd": Recipe(), "chance": Recipe(idle=20.0)}.items():
        model = out / "models" / name
        if name in tasks and not model.exists():
            shutil.copytree(warm_start(default_cache(), recipe=recipe), model)


def main() -> None:
    study = yaml.safe_load((HERE / "study.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--seeds", type=int, help="of each task; default: the study's")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", action="append", default=[], metavar="TASK=FOLDER")
    given = parser.parse_args()
    os.chdir(ROOT)
    chosen = given.tasks or list(study["tasks"])
    if unknown := sorted(set(chosen) - set(study["tasks"])):
        parser.error(f"no task {unknown[0]}: choose from {', '.join(study['tasks'])}")
    models = dict(word.split("=", 1) for word in given.model)
    every = list(trials(study, chosen, given.seeds, models))
    rows = kept(RESULTS)
    if given.check:
        planned = trials(study, list(study["tasks"]), None, {})
        check(pages([row for run in rows.values() for row in run], [t.about for t in planned]))
        return
    if not given.page:
        make_models(given.out, chosen)
        run([trial for trial in every if key_of(trial.about) not in rows], given.out, given.jobs)
    write(trials(study, list(study["tasks"]), None, {}), rows, given.out)


def run(wanted: Sequence[Trial], out: Path, jobs: int) -> None:
    """Those that are not there, so many at a time."""
    left = [
        trial
        for trial in wanted
        if not (finished(trial.folder(out)) or (trial.folder(out) / "failed.txt").exists())
    ]
    print(f"{len(left)} runs are left", file=sys.stderr)
    with ThreadPoolExecutor(jobs) as pool:
        going = {pool.submit(trial.train, out): trial for trial in left}
        for number, done in enumerate(as_completed(going), start=1):
            trial, wrong = going[done], done.result()
            said = wrong or "done"
            line = f"{number} of {len(left)}: {trial.task} {trial.rate:g} {trial.arm}"
            print(f"{line}, seed {trial.seed}: {said}", file=sys.stderr)


def write(every: Iterable[Trial], rows: Mapping[str, list[dict[str, Any]]], out: Path) -> None:
    """The parquet file and what is made of it, from folders and from earlier rows."""
    whole: list[dict[str, Any]] = []
    planned = list(every)
    for trial in planned:
        about = trial.about
        made = curve(trial.folder(out))
        whole += [about | row for row in made] or rows.get(key_of(about), [])
    if not whole:
        raise SystemExit("there are no runs yet")
    pl.DataFrame(whole, infer_schema_length=None).write_parquet(RESULTS)
    for path, text in pages(whole, [trial.about for trial in planned]).items():
        path.write_text(text, encoding="utf-8")


def pages(rows: Sequence[dict[str, Any]], planned: Iterable[dict[str, Any]]) -> dict[Path, str]:
    """The picture, and every page that says something of the study, as they are to be."""
    found = comparisons(rows)
    made = {HERE / "plot.svg": picture(found)}
    for name, block in blocks(found).items():
        path = ROOT / name
        made[path] = put(path.read_text(encoding="utf-8"), block)
    own = HERE / "README.md"
    made[own] = f"{made[own].split(MARK)[0]}{MARK}\n\n{tables(rows, planned)}\n"
    return made


def check(made: Mapping[Path, str]) -> None:
    """Raise ``SystemExit`` that names the pages which say something else."""
    other = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    if other:
        names = ", ".join(str(path.relative_to(ROOT)) for path in other)
        raise SystemExit(f"{names}: not as the rows say: python experiments/accuracy/run.py --page")


if __name__ == "__main__":
    main()
