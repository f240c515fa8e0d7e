"""Read times of decoding, grading, gradients and updates from a real run's journal and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from rollpacker.core import journal
from rollpacker.core.attempts import JournalReader, RecordedAttempt, RecordedStep
from rollpacker.core.types import NO_DRAFTS, Drafted, Prompt, PromptId
from rollpacker.polytrace.compare import METRICS


class GradientTask(NamedTuple):
    """Gradients of responses with these lengths in tokens, prompts included."""

    lengths: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class RunStep:
    """One step of a run. Times are seconds of its clock."""

    told: RecordedStep
    engines: tuple[int, ...]
    remaining: dict[str, int]
    drawn: list[Prompt] = field(default_factory=list[Prompt])
    kept: dict[PromptId, tuple[list[int], bool]] = field(
        default_factory=dict[PromptId, tuple[list[int], bool]]
    )
    """Attempts of each group, and whether it has gradients."""
    tasks: list[GradientTask] = field(default_factory=list[GradientTask])
    drafts: Drafted = NO_DRAFTS
    last_gradient_s: float | None = None
    end_s: float | None = None
    measured: dict[str, float] = field(default_factory=dict[str, float])
    times: list[list[float]] = field(default_factory=list[list[float]])
    """Times of its engines' decode steps, by ``engine/step_times``, summed over steps of similar
    batches. Each row has whether they draft (0, 1), tokens of one sequence, sequences and
    context tokens for each of these, tokens of prefill, sequences that ended, and seconds."""
    start_s: float = 0.0  # from the beginning to an engine's first decode step, mean of the engines

    @property
    def number(self) -> int:
        return self.told.number

    @property
    def attempts(self) -> list[RecordedAttempt]:
        return [*self.told.attempts.values()]

    @property
    def finished(self) -> list[RecordedAttempt]:
        ended = [each for each in self.attempts if each.finish_reason is not None]
        return sorted(ended, key=lambda each: each.end_s or 0.0)

    @property
    def rollout_end_s(self) -> float:
        assert self.told.rollout_end_s is not None
        return self.told.rollout_end_s


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's finished steps in order. ``cores``: shared by workers and driver. 0 if the driver
    has its own, or if unknown. ``max_running``: most sequences that an engine decoded together.
    None if unknown."""

    name: str
    settings: dict[str, Any]
    state: dict[str, Any]
    steps: tuple[RunStep, ...]
    prompt_tokens: dict[PromptId, int]
    cores: int = 0
    max_running: int | None = None


class _Reader(JournalReader):
    def __init__(self) -> None:
        super().__init__()
        self.meta: dict[str, Any] | None = None
        self.of: dict[int, RunStep] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        super().take(line)
        if "meta" in line:
            self.meta = line["meta"] if self.meta is None else self.meta
            return
        now, event = float(line["t"]), line["event"]
        if event["kind"] == "StepStarted":
            number, engines = event["step"], tuple(event["engines"])
            self._now = RunStep(self.steps[number], engines, dict(event["remaining"]))
            self.of[number] = self._now
        elif self.of:
            self._seen(self._now, now, event)
        for decision in line["decisions"]:
            if decision["kind"] == "AcceptGroup":
                assert self.meta is not None
                trained = decision["informative"] or self.meta["settings"]["rules"]["train_all"]
                self._now.kept[decision["prompt"]] = (decision["attempts"], trained)

    def _seen(self, step: RunStep, now: float, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "PromptsDrawn":
                step.drawn += [
                    Prompt(id=each["id"], domain=each["domain"], tokens=each["tokens"])
                    for each in event["prompts"]
                ]
            case "AttemptFinished":
                counts = (event.get(count, 0) for count in Drafted._fields)
                step.drafts = step.drafts.plus(Drafted(*counts))
            case "GradientsAccumulated":
                step.last_gradient_s = now
                lengths = [
                    self._length(step.told.attempts[attempt])
                    for part in event["parts"]
                    for attempts, trained in (step.kept[part["prompt"]],)
                    for attempt in attempts[part["start"] : part["stop"]]
                    if trained
                ]
                step.tasks.append(GradientTask(tuple(lengths), event["seconds"]))
            case "UpdateApplied":
                step.end_s = now
            case _:
                pass

    def _length(self, attempt: RecordedAttempt) -> int:
        added = sum(turn.added for turn in attempt.turns)
        return attempt.tokens + added + self.prompts[attempt.prompt]["tokens"]


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run of ours, with times."""
    return (path / "journal.jsonl").is_file() and (path / "metrics.jsonl").is_file()


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ``ValueError`` for other folders or without a finished step."""
    if not is_run(folder):
        raise ValueError(f"{folder}: not a run's folder: journal.jsonl and metrics.jsonl expected")
    reader = _Reader()
    for _, line in journal.read_all(folder / "journal.jsonl"):
        reader.take(line)
    measured = _metrics(folder / "metrics.jsonl")
    steps: list[RunStep] = []
    for number, step in sorted(reader.of.items()):
        line = measured.get(number, {})
        step.measured = {phase: float(line[key]) for phase, key in METRICS.items() if key in line}
        step.times = line.get("engine/step_times", [])
        step.start_s = line.get("engine/start_s", 0.0)
        if step.end_s is not None and len(step.measured) == len(METRICS):
            steps.append(step)
    if reader.meta is None or not steps:
        raise ValueError(f"{folder}: no step of this run has ended, nothing was timed")
    return RunRecord(
        folder.resolve().name,
        reader.meta["settings"],
        reader.meta["state"],
        tuple(steps),
        {PromptId(name): each["tokens"] for name, each in reader.prompts.items()},
        shared_cores(folder),
        _max_running(folder),
    )


def shared_cores(folder: Path) -> int:
    """Return the cores that driver and workers share. 0 if the driver had its own, or if
    unknown."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    cores = cast(dict[str, Any], summary).get("cores")
    return cores["all"] if cores and cores["workers"] >= cores["all"] else 0


def _max_running(folder: Path) -> int | None:
    try:
        config: Any = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    try:
        return config["engine"].get("max_running")
    except (AttributeError, KeyError, TypeError):  # of another kind of file
        return None


def _metrics(path: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for _, line in journal.read(path):
        if line.get("emulated"):
            raise ValueError(
                f"{path}: an emulated run (devices.emulate): its times are a calibration's, they "
                "measure no device"
            )
        found[line["step"]] = line
    return found
