"""Follows the journal of a run: what its engines, driver and replicas did, and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollpacker.core import journal
from rollpacker.core.types import NO_DRAFTS, Drafted, Prompt, PromptId
from rollpacker.sim.workload.workload import ScriptedTurn

# --- run lanes ------------------------------------------------------------------------------------


class Handled(NamedTuple):
    """Responses that the driver dealt with while the workers left it no core."""

    ended: int = 0
    graded: int = 0

    def since(self, earlier: Handled) -> Handled:
        """Those after an earlier count."""
        return Handled(self.ended - earlier.ended, self.graded - earlier.graded)


NONE = Handled()


class Mark(NamedTuple):
    """A moment of an engine.

    Args:
        at_s: when it was.
        sequence_s: seconds that sequences had run by then, added up.
        prefilled: tokens that turns had brought by then.
        handled: by the driver, by then.
    """

    at_s: float = 0.0
    sequence_s: float = 0.0
    prefilled: int = 0
    handled: Handled = NONE


START = Mark()


@dataclass(slots=True, eq=False)
class Tried:
    """An attempt: ``tokens`` is a lower bound until it has ended."""

    prompt: PromptId
    index: int
    engine: int
    base: int = 0
    """Tokens that it had when it came to its engine, or began its turn there."""
    added: int = 0
    """Put in by its environment so far."""
    held: int = 0
    """Of both, what its engine has when a turn has ended."""
    clock: Hashable = None
    """Whose decode steps are counted: of two with one clock it is known which step was when."""
    offset: int = 0
    """Steps on that clock before its first one."""
    entered: Mark = START
    """When it began to run."""
    lag: float | None = None
    """Steps that its turn then waited for the one in flight to end, on average; None where it came
    with the others."""
    tokens: int = 0
    end_s: float | None = None
    graded_s: float | None = None
    reward: float | None = None
    decoding: bool = True
    """It has not ended."""
    acting_s: float | None = None
    """Since when its environment is at work; None where it is not."""
    waited_s: float | None = None
    """How long its environment had been at work when it was stopped; None where it was not."""
    turns: list[ScriptedTurn] = field(default_factory=list[ScriptedTurn])
    """Those that its environment has had, begun with its beginning; empty where it has none."""

    @property
    def step(self) -> int:
        """The one on its clock that gave its last known token."""
        return self.offset + self.tokens - self.base

    def end_turn(self, now: float, tokens: int) -> None:
        self.turns.append(ScriptedTurn(tokens - sum(turn.tokens for turn in self.turns)))
        self.tokens, self.acting_s, self.held = tokens, now, tokens + self.added

    def answer(self, seconds: float, added: int) -> None:
        turn = self.turns.pop() if self.turns else ScriptedTurn(0)
        self.turns.append(ScriptedTurn(turn.tokens, seconds, added))
        self.added += added

    def stop(self, now: float, tokens: int) -> None:
        """It is not wanted any more."""
        if self.acting_s is not None:
            self.waited_s = now - self.acting_s
        self.tokens, self.decoding, self.acting_s = max(self.tokens, tokens), False, None

    def end(self, now: float, tokens: int) -> None:
        if self.acting_s is not None:
            if self.turns:
                self.answer(now - self.acting_s, 0)
        elif self.turns:
            self.turns.append(ScriptedTurn(tokens - sum(turn.tokens for turn in self.turns)))
        self.tokens, self.decoding, self.acting_s = tokens, False, None


@dataclass(slots=True)
class Lane:
    """An engine that decodes at most ``most`` together; the others wait in the order in which they
    came."""

    most: int
    running: list[Tried] = field(default_factory=list[Tried])
    waiting: deque[Tried] = field(default_factory=deque[Tried])
    prompts: set[PromptId] = field(default_factory=set[PromptId])
    """That turns have brought."""
    prefilled: int = 0
    """Tokens that turns have brought."""
    _sequence_s: float = 0.0
    _since: float = 0.0

    def mark(self, now: float, handled: Handled) -> Mark:
        self._sequence_s += len(self.running) * (now - self._since)
        self._since = now
        return Mark(now, self._sequence_s, self.prefilled, handled)

    def join(self, tried: Tried, clock: Hashable, mark: Mark) -> None:
        tried.clock, tried.offset = clock, 0
        if len(self.running) < self.most:
            tried.entered = mark
            self.running.append(tried)
        else:
            self.waiting.append(tried)

    def leave(self, tried: Tried, clock: Hashable, step: int, mark: Mark) -> None:
        """One has gone, at ``step`` of ``clock``: the next one takes its place."""
        if tried in self.waiting:
            self.waiting.remove(tried)
            return
        self.running.remove(tried)
        if self.waiting:
            following = self.waiting.popleft()
            following.clock, following.offset, following.entered = clock, step, mark
            if following.lag is not None:
                following.lag = 0.0
            self.running.append(following)

    def bring(self, tried: Tried, prompt_tokens: int) -> None:
        """A turn comes, with what the engine does not have of it."""
        self.prefilled += tried.tokens + tried.added - tried.held
        if tried.prompt not in self.prompts:
            self.prompts.add(tried.prompt)
            self.prefilled += prompt_tokens


# --- run steps ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """``steps`` decode steps of one engine between two ends of its responses or their turns, or
    from a turn's begin to its end.

    ``batch`` sequences of ``context`` tokens in all, on average over the steps; ``seconds``, in
    which turns brought ``prefill`` tokens.
    Where it decoded ``ahead`` these are tokens of a sequence, not steps.
    """

    batch: float
    context: float
    steps: float
    seconds: float
    handled: Handled = NONE
    ahead: bool = False
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class First:
    """The first end on an engine in a round: ``seconds`` after the round began, without those in
    which its environment did."""

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


# --- run reader -----------------------------------------------------------------------------------

_WORK = ("AttemptFinished", "AttemptAborted", "AttemptMigrated", "AttemptGraded", "TurnFinished")
"""Events with work of the driver for one response, unless its environment was at work."""
_LAG = 0.5
"""Of a step that is in flight when a turn comes, what is left on average."""


class _End(NamedTuple):
    """The last end on an engine: when, and which step of which clock."""

    mark: Mark
    clock: Hashable
    step: int


class Reader:
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
        self._opens = False
        self._step: RunStep | None = None
        self._previous: dict[int, _End | None] = {}
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
        tried = step.attempts.get(event.get("attempt", -1))
        acting = tried is not None and tried.acting_s is not None
        if tried is None:
            self._happened(step, now, event)
        else:
            self._happened_to(step, now, tried, event)
        for decision in decisions:
            self._decided(step, now, decision)
        if self._cores and not acting:
            self._count(step, event["kind"])

    def _count(self, step: RunStep, kind: str) -> None:
        """The driver's work on an event comes after it."""
        graded = kind == "AttemptGraded"
        if kind not in _WORK or (graded and not self._beside):
            return
        tried = step.attempts.values()
        busy = {each.engine for each in tried if each.decoding and each.acting_s is None}
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
            case "GradientsAccumulated":
                self._accumulated(step, now, event)
            case "UpdateApplied":
                step.end_s = now
            case "DevicesLost":
                self._previous.clear()
            case _:
                pass

    def _happened_to(
        self, step: RunStep, now: float, tried: Tried, event: Mapping[str, Any]
    ) -> None:
        match event["kind"]:
            case "AttemptFinished":
                self._finished(step, now, tried, event)
            case "TurnFinished":
                self._measure(step, now, tried, event["tokens"])
                tried.end_turn(now, event["tokens"])
            case "EnvironmentReplied":
                self._replied(now, tried, event)
            case "AttemptGraded":
                tried.graded_s, tried.reward = now, event["reward"]
            case "AttemptAborted" | "AttemptFailed" | "EpisodeFailed":
                self._stopped(now, tried, event)
            case "AttemptMigrated":
                self._migrated(now, tried, event)
            case _:
                pass

    def _decided(self, step: RunStep, now: float, decision: Mapping[str, Any]) -> None:
        match decision["kind"]:
            case "StartAttempt":
                tried = Tried(decision["prompt"], decision["index"], decision["engine"])
                step.attempts[decision["attempt"]] = tried
                self._begin(now, tried)
            case "ContinueAttempt":
                self._go_on(now, step.attempts[decision["attempt"]], decision["engine"])
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

    def _mark(self, engine: int, now: float) -> Mark:
        return self._lane(engine).mark(now, self._handled)

    def _begin(self, now: float, tried: Tried) -> None:
        """An attempt comes to its engine, or to its environment first, where there is one."""
        if self._opens:
            tried.acting_s = now
        else:
            self._lane(tried.engine).join(tried, now, self._mark(tried.engine, now))

    def _replied(self, now: float, tried: Tried, event: Mapping[str, Any]) -> None:
        if event["turn"] < 0:
            # Until the first one says so, nothing tells that there is an environment.
            self._opens = True
            if tried.acting_s is None:
                mark = self._mark(tried.engine, now)
                self._lane(tried.engine).leave(tried, ("opened", now), 0, mark)
        tried.answer(event["seconds"], event["tokens"])

    def _go_on(self, now: float, tried: Tried, engine: int) -> None:
        tried.engine, tried.base, tried.acting_s = engine, tried.tokens, None
        lane, mark = self._lane(engine), self._mark(engine, now)
        lane.bring(tried, self.prompt_tokens[tried.prompt])
        tried.lag = _LAG if any(each.entered.at_s < now for each in lane.running) else 0.0
        lane.join(tried, now, mark)

    def _finished(self, step: RunStep, now: float, tried: Tried, event: Mapping[str, Any]) -> None:
        drafts = Drafted(*(event.get(count, 0) for count in Drafted._fields))
        step.drafts = step.drafts.plus(drafts)
        if tried.acting_s is None:
            self._measure(step, now, tried, event["tokens"])
        tried.end(now, event["tokens"])
        tried.end_s = step.last_end_s = now

    def _measure(self, step: RunStep, now: float, tried: Tried, tokens: int) -> None:
        """An attempt leaves its engine with so many tokens: what that tells of time."""
        engine, lane = tried.engine, self._lane(tried.engine)
        mark, running = self._mark(engine, now), list(lane.running)
        tried.tokens = tokens
        lane.leave(tried, tried.clock, tried.step, mark)
        known, previous = engine in self._previous, self._previous.get(engine)
        self._previous[engine] = _End(mark, tried.clock, tried.step)
        if not known and tried.base == 0:
            step.firsts.append(self._first(now - step.start_s, tried, running))
        if previous is not None and previous.clock == tried.clock:
            steps, begun = tried.step - previous.step, previous.mark
            if steps <= 0:
                self._previous[engine] = previous
                return
        elif tried.lag is not None:
            steps, begun = tokens - tried.base + tried.lag, tried.entered
        else:
            return
        step.intervals.append(self._interval(tried, running, steps, begun, mark))

    def _ahead(self, engine: int, batch: float) -> bool:
        return batch <= self._below.get(engine, 0)

    def _first(self, seconds: float, tried: Tried, running: list[Tried]) -> First:
        opening = tried.turns[0].tool_s if tried.turns else 0.0
        prompts = [self.prompt_tokens[each.prompt] for each in running]
        prefill = {each.prompt for each in running}
        batch = len(running)
        return First(
            batch,
            sum(prompts) + batch * tried.tokens / 2,
            tried.tokens,
            sum(self.prompt_tokens[prompt] for prompt in prefill),
            seconds - opening,
            self._handled,
            self._ahead(tried.engine, batch),
        )

    def _interval(
        self, tried: Tried, running: list[Tried], steps: float, begun: Mark, mark: Mark
    ) -> Interval:
        """From one mark to another, at which ``running`` ran."""
        seconds = mark.at_s - begun.at_s
        batch = float(len(running))
        if tried.turns and seconds > 0.0:
            # Others came and went.
            batch = max(1.0, (mark.sequence_s - begun.sequence_s) / seconds)
        context = 0.0
        for each in running:
            gained = _gained(each, tried, mark.at_s, steps / max(seconds, 1e-9))
            whole = self.prompt_tokens[each.prompt] + each.base + each.added + gained
            context += whole - min(gained, steps) / 2
        return Interval(
            batch,
            context * batch / len(running),
            steps,
            seconds,
            mark.handled.since(begun.handled),
            self._ahead(tried.engine, batch),
            mark.prefilled - begun.prefilled,
        )

    def _stopped(self, now: float, tried: Tried, event: Mapping[str, Any]) -> None:
        if not tried.decoding:
            return
        if tried.acting_s is None:
            mark = self._mark(tried.engine, now)
            self._lane(tried.engine).leave(tried, ("stopped", now), 0, mark)
            self._previous[tried.engine] = None
        tried.stop(now, event.get("tokens", 0))

    def _migrated(self, now: float, tried: Tried, event: Mapping[str, Any]) -> None:
        source, tried.engine = tried.engine, event["engine"]
        if tried.acting_s is not None:
            tried.held = 0
            return
        self._lane(source).leave(tried, ("moved", now), 0, self._mark(source, now))
        self._previous[source] = None
        tried.base, tried.lag = event["tokens"], None
        self._lane(tried.engine).join(tried, now, self._mark(tried.engine, now))
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
                    each.tokens + each.added + self.prompt_tokens[each.prompt]
                    for each in group[part["start"] : part["stop"]]
                ]
        handled = self._handled.since(handled)
        step.tasks.append(GradientTask(tuple(lengths), now - began, handled))


def _gained(each: Tried, last: Tried, now: float, pace: float) -> float:
    """Tokens since it came of one that runs, when ``last`` gave its last one; one of another clock
    has decoded at this pace, tokens a second."""
    if each.clock == last.clock:
        return last.step - each.offset
    return (now - each.entered.at_s) * pace
