"""What a real run's journal and metrics tell of time: decoding, grading, gradients, updates."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollpacker.core import journal
from rollpacker.core.types import NO_DRAFTS, Drafted, Prompt, PromptId
from rollpacker.sim.run_lanes import Lane, Tried
from rollpacker.sim.shared_cores import SharedCores, read_shared_cores

METRICS = {"step": "step_time", "rollout": "timing_s/rollout", "train": "timing_s/train"}
"""Phases that a run times itself."""
_WORK = ("AttemptFinished", "AttemptAborted", "AttemptMigrated", "AttemptGraded")
"""Events with work of the driver for one response."""


@dataclass(frozen=True, slots=True)
class Handled:
    """Responses that the driver dealt with while the workers left it no core."""

    ended: int = 0
    graded: int = 0

    def since(self, earlier: Handled) -> Handled:
        """Those after an earlier count."""
        return Handled(self.ended - earlier.ended, self.graded - earlier.graded)


NONE = Handled()


@dataclass(frozen=True, slots=True)
class Interval:
    """``steps`` decode steps of one engine between two of its responses' ends.

    ``batch`` sequences of ``context`` tokens in all, on average over the steps; ``seconds``.
    Where it decoded ``ahead`` these are tokens of a sequence, not steps.
    """

    batch: int
    context: float
    steps: int
    seconds: float
    handled: Handled = NONE
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class First:
    """An engine's first response of a round: ``seconds`` after the round began."""

    batch: int
    context: float
    steps: int
    prefill: int
    seconds: float
    handled: Handled = NONE
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class GradientTask:
    """Gradients of responses with these lengths, prompts included; ``seconds`` with messages."""

    lengths: tuple[int, ...]
    seconds: float
    handled: Handled = NONE


@dataclass(slots=True)
class RunStep:
    """One step of a run; times are seconds of its clock."""

    number: int
    start_s: float
    engines: tuple[int, ...]
    remaining: dict[str, int]
    drawn: list[Prompt] = field(default_factory=list[Prompt])
    attempts: dict[int, Tried] = field(default_factory=dict[int, Tried])
    groups: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])
    trained: set[PromptId] = field(default_factory=set[PromptId])
    """Kept groups that have gradients."""
    intervals: list[Interval] = field(default_factory=list[Interval])
    firsts: list[First] = field(default_factory=list[First])
    tasks: list[GradientTask] = field(default_factory=list[GradientTask])
    last_end_s: float = 0.0
    rollout_end_s: float = 0.0
    drafts: Drafted = NO_DRAFTS
    """What decoding ahead brought."""
    last_gradient_s: float | None = None
    end_s: float | None = None
    measured: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase, by the run's own metrics."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Args:
        name: of its folder.
        settings: the policy's, as in the journal.
        state: the policy's at the start.
        steps: those that ended, in order.
        prompt_tokens: of every prompt.
        shared: cores that workers share with the driver; None where it has its own, or where
            nothing says so.
        max_running: most sequences that an engine decoded together; None where nothing says so.
    """

    name: str
    settings: dict[str, Any]
    state: dict[str, Any]
    steps: tuple[RunStep, ...]
    prompt_tokens: dict[PromptId, int]
    shared: SharedCores | None = None
    max_running: int | None = None


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run of ours, with times."""
    return (path / "journal.jsonl").is_file() and (path / "metrics.jsonl").is_file()


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ``ValueError`` when it is none or no step has ended."""
    path = folder / "journal.jsonl"
    if not is_run(folder):
        raise ValueError(f"{folder}: not a run's folder: journal.jsonl and metrics.jsonl expected")
    shared = read_shared_cores(folder)
    most = _max_running(folder)
    reader = _Reader(shared.cores if shared else 0, most or sys.maxsize)
    meta: dict[str, Any] | None = None
    for _, line in journal.read_all(path):
        if "meta" in line:
            meta = line["meta"] if meta is None else meta
            reader.configure(line["meta"])
        else:
            reader.take(float(line["t"]), line["event"], line["decisions"])
    measured = _metrics(folder / "metrics.jsonl")
    steps: list[RunStep] = []
    for number, step in sorted(reader.steps.items()):
        step.measured = measured.get(number, {})
        if step.end_s is not None and len(step.measured) == len(METRICS):
            steps.append(step)
    if meta is None or not steps:
        raise ValueError(f"{folder}: no step of this run has ended, nothing was timed")
    name = folder.resolve().name
    settings, state = meta["settings"], meta["state"]
    return RunRecord(name, settings, state, tuple(steps), reader.prompt_tokens, shared, most)


def _max_running(folder: Path) -> int | None:
    """``engine.max_running`` of a run."""
    try:
        config: Any = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    try:
        return config["engine"].get("max_running")
    except (AttributeError, KeyError, TypeError):  # of another kind of file
        return None


def _metrics(path: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for _, line in journal.read(path):
        if line.get("emulated"):
            raise ValueError(
                f"{path}: an emulated run (devices.emulate): its times are a calibration's, they "
                "measure no device"
            )
        found[line["step"]] = {
            phase: float(line[key]) for phase, key in METRICS.items() if key in line
        }
    return found


class _Reader:
    """Follows a journal. Times are the driver's, when it learned of an event.

    Args:
        cores: that workers share with the driver; 0 where they do not.
        most: sequences that an engine decodes together.
    """

    def __init__(self, cores: int, most: int) -> None:
        self._cores = cores
        self._most = most
        self._lanes: dict[int, Lane] = {}
        self._handled = NONE
        self.steps: dict[int, RunStep] = {}
        self.prompt_tokens: dict[PromptId, int] = {}
        self._train_all = False
        self._beside = False
        self._step: RunStep | None = None
        self._previous: dict[int, tuple[float, Tried, Handled] | None] = {}
        self._below: dict[int, int] = {}
        self._begun: dict[int, list[tuple[float, Handled]]] = {}
        self._free: dict[int, tuple[float, Handled]] = {}

    def configure(self, meta: Mapping[str, Any]) -> None:
        """What the policy was told, and what it holds back."""
        self._train_all = bool(meta["settings"]["rules"]["train_all"])
        self._beside = bool(meta["settings"]["asynchronous_grading"])
        held = journal.prompts_in(meta["state"])
        self.prompt_tokens |= {PromptId(each["id"]): each["tokens"] for each in held}

    def take(self, now: float, event: Mapping[str, Any], decisions: list[dict[str, Any]]) -> None:
        """One line of the journal."""
        if event["kind"] == "StepStarted":
            self._start(now, event)
        step = self._step
        if step is None:
            return
        self._happened(step, now, event)
        for decision in decisions:
            self._decided(step, now, decision)
        if self._cores:
            self._count(step, event["kind"])

    def _count(self, step: RunStep, kind: str) -> None:
        """The driver's work on an event comes after it."""
        graded = kind == "AttemptGraded"
        if kind not in _WORK or (graded and not self._beside):
            return
        busy = {tried.engine for tried in step.attempts.values() if tried.decoding}
        busy.update(replica for replica, tasks in self._begun.items() if tasks)
        if len(busy) >= self._cores:
            self._handled = Handled(
                self._handled.ended + (not graded), self._handled.graded + graded
            )

    def _start(self, now: float, event: Mapping[str, Any]) -> None:
        number, engines = event["step"], tuple(event["engines"])
        self._step = self.steps[number] = RunStep(number, now, engines, dict(event["remaining"]))
        self._previous = {}
        self._lanes = {engine: Lane(self._most) for engine in engines}
        self._below = {}
        self._begun = {replica: [] for replica in event["replicas"]}
        self._handled = NONE
        self._free = dict.fromkeys(event["replicas"], (now, NONE))

    def _happened(self, step: RunStep, now: float, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "PromptsDrawn":
                for prompt in event["prompts"]:
                    drawn = Prompt(
                        id=prompt["id"], domain=prompt["domain"], tokens=prompt["tokens"]
                    )
                    step.drawn.append(drawn)
                    self.prompt_tokens[drawn.id] = drawn.tokens
            case "AttemptFinished":
                drafts = Drafted(*(event.get(count, 0) for count in Drafted._fields))
                step.drafts = step.drafts.plus(drafts)
                self._finished(step, now, event["attempt"], event["tokens"])
            case "AttemptGraded":
                tried = step.attempts[event["attempt"]]
                tried.graded_s, tried.reward = now, event["reward"]
            case "AttemptAborted" | "AttemptFailed":
                self._stopped(step, now, event)
            case "AttemptMigrated":
                self._migrated(step, now, event)
            case "GradientsAccumulated":
                self._accumulated(step, now, event)
            case "UpdateApplied":
                step.end_s = now
            case "DevicesLost":
                self._previous.clear()
            case _:
                pass

    def _decided(self, step: RunStep, now: float, decision: Mapping[str, Any]) -> None:
        match decision["kind"]:
            case "StartAttempt":
                tried = Tried(decision["prompt"], decision["index"], decision["engine"])
                step.attempts[decision["attempt"]] = tried
                self._lane(tried.engine).join(tried, now)
            case "Speculate":
                self._below[decision["engine"]] = decision["below"]
            case "MigrateAttempts":
                self._previous[decision["source"]] = None
            case "AcceptGroup":
                step.groups[decision["prompt"]] = decision["attempts"]
                if decision["informative"] or self._train_all:
                    step.trained.add(decision["prompt"])
            case "AccumulateGradients":
                self._begun[decision["replica"]].append((now, self._handled))
            case "FinishRollout":
                step.rollout_end_s = now
            case _:
                pass

    def _lane(self, engine: int) -> Lane:
        """One that was formed since the round began has no lane yet."""
        return self._lanes.setdefault(engine, Lane(self._most))

    def _finished(self, step: RunStep, now: float, attempt: int, tokens: int) -> None:
        tried = step.attempts[attempt]
        lane = self._lane(tried.engine)
        running = list(lane.running)
        tried.tokens, tried.end_s, tried.decoding = tokens, now, False
        lane.leave(tried, tried.clock, tried.step)
        step.last_end_s = now
        batch = len(running)
        known = tried.engine in self._previous
        ahead = batch <= self._below.get(tried.engine, 0)
        previous = self._previous.get(tried.engine)
        self._previous[tried.engine] = (now, tried, self._handled)
        prompts = sum(self.prompt_tokens[each.prompt] for each in running)
        if not known and tried.base == 0:
            prefill = {each.prompt for each in running}
            context = prompts + batch * tokens / 2
            step.firsts.append(
                First(
                    batch,
                    context,
                    tokens,
                    sum(self.prompt_tokens[prompt] for prompt in prefill),
                    now - step.start_s,
                    self._handled,
                    ahead,
                )
            )
        if previous is None or previous[1].clock != tried.clock:
            return
        since, other, handled = previous
        steps = tried.step - other.step
        if steps <= 0:
            self._previous[tried.engine] = previous
            return
        context = prompts - batch * steps / 2 + sum(_held(each, tried) for each in running)
        handled = self._handled.since(handled)
        step.intervals.append(Interval(batch, context, steps, now - since, handled, ahead))

    def _stopped(self, step: RunStep, now: float, event: Mapping[str, Any]) -> None:
        tried = step.attempts[event["attempt"]]
        if tried.decoding:
            tried.decoding = False
            tried.tokens = event.get("tokens", 0)
            self._lane(tried.engine).leave(tried, ("stopped", now), 0)
            self._previous[tried.engine] = None

    def _migrated(self, step: RunStep, now: float, event: Mapping[str, Any]) -> None:
        tried = step.attempts[event["attempt"]]
        self._lane(tried.engine).leave(tried, ("moved", now), 0)
        self._previous[tried.engine] = None
        tried.engine, tried.base, tried.offset = event["engine"], event["tokens"], 0
        self._lane(tried.engine).join(tried, now)
        self._previous[tried.engine] = None

    def _accumulated(self, step: RunStep, now: float, event: Mapping[str, Any]) -> None:
        replica = event["replica"]
        began, handled = max(
            self._begun[replica].pop(0), self._free[replica], key=lambda each: each[0]
        )
        self._free[replica] = (now, self._handled)
        step.last_gradient_s = now
        lengths: list[int] = []
        for part in event["parts"]:
            group = [step.attempts[a] for a in step.groups[part["prompt"]]]
            if part["prompt"] in step.trained:
                lengths += [
                    each.tokens + self.prompt_tokens[each.prompt]
                    for each in group[part["start"] : part["stop"]]
                ]
        handled = self._handled.since(handled)
        step.tasks.append(GradientTask(tuple(lengths), now - began, handled))


def _held(each: Tried, last: Tried) -> int:
    """Response tokens of one that runs, when ``last`` gave its last one; those of another clock
    are taken to have come together with it."""
    if each.clock == last.clock:
        return each.base + last.step - each.offset
    return each.base + last.tokens - last.base
