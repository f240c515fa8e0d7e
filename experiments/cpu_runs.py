"""The arms of the experiments, their real runs on a CPU, and what is read from a run."""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rollpacker.config import load

HERE = Path(__file__).parent
TRAINED_STEPS = 30
"""GRPO steps between the two models: after the warm start, and with lengths that training gives."""


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
        name: its folder.
        title: a line.
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
        return mean([step[key] for step in self.of(*kinds)])


def mean(values: Sequence[float]) -> float:
    """Mean; NaN of nothing."""
    return statistics.fmean(values) if values else float("nan")


def experiments() -> dict[str, Experiment]:
    """All figures that have arms, by name, in the paper's order."""

    def order(path: Path) -> tuple[int, str]:
        return len(path.parent.name), path.parent.name

    return {path.parent.name: read(path) for path in sorted(HERE.glob("*/arms.yaml"), key=order)}


def read(path: Path) -> Experiment:
    """One figure's arms."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms = {name: Arm(**arm) for name, arm in tree.pop("arms", {}).items()}
    return Experiment(name=path.parent.name, arms=arms, **tree)


def model_of(experiment: Experiment, models: Path) -> Path:
    """The model that an experiment starts from: ``warm`` or ``trained``."""
    return models / Path(load(HERE / experiment.name / "cpu.yaml").model.path).name


def make_model(model: Path, say: Callable[[str], None]) -> None:
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


def command(experiment: Experiment, arm: Arm) -> str:
    """How to run one arm alone."""
    words = [f"experiments/{experiment.name}/cpu.yaml", *arm.set, *arm.cpu]
    return f"rollpacker train {shlex.join(words)}"


def run_arms(
    experiment: Experiment, out: Path, model: Path, repeats: int, overrides: Sequence[str]
) -> Iterator[Run]:
    """Every arm ``repeats`` times, one after the other; every other time in reverse.

    The runs of one repetition have one seed: the same prompts in the same order.
    """
    from rollpacker.job import train

    path = HERE / experiment.name / "cpu.yaml"
    shutil.rmtree(out / experiment.name, ignore_errors=True)
    for number in range(repeats):
        for name in list(experiment.arms)[:: -1 if number % 2 else 1]:
            arm, place = experiment.arms[name], run_folder(experiment, out, number, name)
            own = [f"model.path={model}", f"output={place}", f"seed={number}"]
            train(load(path, [*arm.set, *arm.cpu, *own, *overrides]))
            yield finished(name, number, place)


def runs_there(experiment: Experiment, out: Path) -> list[Run]:
    """Those of ``run_arms``, made earlier."""
    found: list[Run] = []
    for number in range(len(list((out / experiment.name).iterdir()))):
        for name in experiment.arms:
            place = run_folder(experiment, out, number, name)
            if (place / "summary.json").exists():
                found.append(finished(name, number, place))
    return found


def run_folder(experiment: Experiment, out: Path, number: int, arm: str) -> Path:
    """Where one repetition of an arm is."""
    return out / experiment.name / f"{number}-{slug(arm)}"


def slug(name: str) -> str:
    """A file name."""
    return "".join(c if c.isalnum() or c == "." else "-" for c in name)


def finished(arm: str, number: int, folder: Path) -> Run:
    """What a run has left."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Run(
        arm=arm,
        number=number,
        summary=summary,
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
