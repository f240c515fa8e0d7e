"""The round's record: its attempts, their engines and their outcomes. The parts of a policy read a
``Ledger``. Only ``RolloutPolicy`` holds the ``LedgerWriter``. It enters every event before a part
gets it, and every decision as it is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, FinishReason, PromptId, RoundKind


class Stage(Enum):
    """The state of an attempt."""

    RUNNING = auto()  # it decodes, waits for its environment, or moves to another engine
    FINISHED = auto()  # its response is complete, and nobody has asked for its reward
    GRADING = auto()
    GRADED = auto()
    STOPPING = auto()  # it must stop and has not confirmed it
    LOST = auto()  # its engine died
    OVER = auto()  # it has stopped, or has failed


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of the round.

    Args:
        index: of its sample in the group.
        place: of its prompt in the order of starts.
        bound: where it will decode after all moves, else its ``engine``.
        tokens: of its response once complete, until then of its finished turns.
        added: tokens that its environment put in.
        turns: finished ones, with an environment.
        wait_s: time that its environment took.
        reward: None before it is graded, and if no function applies.
    """

    id: AttemptId
    prompt: PromptId
    index: int
    place: int
    engine: EngineId
    bound: EngineId
    stage: Stage = Stage.RUNNING
    tokens: int = 0
    added: int = 0
    turns: int = 0
    wait_s: float = 0.0
    finish_reason: FinishReason | None = None
    reward: float | None = None


class Ledger:
    """The parts' view of the round.

    Attributes:
        attempts, groups: all, in order of their start, and the same by prompt.
        running: those that decode, or will after their environment's reply.
        kept: accepted groups, by sample index.
        grading, stopping: number of attempts being graded, or not yet confirmed as stopped.
        loads, bound: attempts that each live engine runs, before and after all moves.
        busy: engines with any attempt after all moves.
        idled: engines in the order in which they ran out of attempts or were changed.
    """

    def __init__(self) -> None:
        self._begin(-1, ())

    def _begin(self, step: int, engines: tuple[EngineId, ...]) -> None:
        self.step = step
        self.kind = RoundKind.FULL
        self.updates = 1
        self.attempts: dict[AttemptId, Attempt] = {}
        self.groups: dict[PromptId, list[Attempt]] = {}
        self.running: dict[AttemptId, Attempt] = {}
        self.kept: dict[PromptId, tuple[Attempt, ...]] = {}
        self.grading = 0
        self.stopping = 0
        self.loads: dict[EngineId, int] = dict.fromkeys(engines, 0)
        self.bound: dict[EngineId, int] = dict.fromkeys(engines, 0)
        self.busy = 0
        self.idled: list[EngineId] = []
        self._lead: dict[EngineId, EngineId] = {}
        self._members: dict[EngineId, tuple[EngineId, ...]] = {}

    def decodes(self, engine: EngineId) -> bool:
        """Whether its devices decode, for itself or for the engine that it joined."""
        return self.bound.get(self._lead.get(engine, engine), 0) > 0

    def by_engine(self) -> dict[EngineId, tuple[AttemptId, ...]]:
        """Attempts of each engine after all moves, oldest first. Idle engines are left out."""
        found: dict[EngineId, list[AttemptId]] = {}
        for attempt in sorted(self.running):
            found.setdefault(self.running[attempt].bound, []).append(attempt)
        return {engine: tuple(attempts) for engine, attempts in found.items()}

    def lost_with(self, engine: EngineId) -> list[Attempt]:
        """Attempts that died with an engine, oldest first."""
        lost = (one for one in self.attempts.values() if one.stage is Stage.LOST)
        return [attempt for attempt in lost if attempt.engine == engine]


class LedgerWriter(Ledger):
    """The writer's view of the ledger."""

    def take(self, event: ev.Event) -> Attempt | None:
        """Enter an event. Returns the attempt that it changes, or None if it changes none."""
        match event:
            case ev.StepStarted():
                self._begin(event.step, event.engines)
            case ev.DevicesLost():
                self._lost(event)
            case (
                ev.AttemptFinished()
                | ev.TurnFinished()
                | ev.EnvironmentReplied()
                | ev.AttemptMigrated()
            ):
                attempt = self.running.get(event.attempt)
                return None if attempt is None else self._went_on(attempt, event)
            case (
                ev.AttemptGraded()
                | ev.AttemptAborted()
                | ev.AttemptFailed()
                | ev.GradingFailed()
                | ev.EpisodeFailed()
            ):
                attempt = self.attempts.get(event.attempt)
                return None if attempt is None else self._ended(attempt, event)
            case _:
                pass
        return None

    def follow(self, decision: do.Decision) -> None:
        match decision:
            case do.BeginRound():
                self.kind, self.updates = decision.round, decision.updates
            case do.StartAttempt():
                self._started(decision)
            case do.AbortAttempt():
                self._leave(self.attempts[decision.attempt], Stage.STOPPING)
                self.stopping += 1
            case do.GradeAttempt():
                self.attempts[decision.attempt].stage = Stage.GRADING
                self.grading += 1
            case do.MigrateAttempts():
                for attempt in decision.attempts:
                    self._bind(self.running[attempt], decision.target)
            case do.FormEngine():
                self._lead |= dict.fromkeys(decision.members, decision.engine)
                self._members[decision.engine] = decision.members
                self._idle(decision.engine)
            case do.AcceptGroup():
                kept = tuple(map(self.attempts.__getitem__, decision.attempts))
                self.kept[decision.prompt] = kept
            case _:
                pass

    def _went_on(
        self,
        attempt: Attempt,
        event: ev.AttemptFinished | ev.TurnFinished | ev.EnvironmentReplied | ev.AttemptMigrated,
    ) -> Attempt | None:
        match event:
            case ev.AttemptFinished():
                self._leave(attempt, Stage.FINISHED)
                attempt.tokens, attempt.finish_reason = event.tokens, event.finish_reason
                attempt.wait_s += event.seconds
                attempt.turns += event.turns
            case ev.TurnFinished():
                attempt.turns += 1
                attempt.tokens = event.tokens
            case ev.EnvironmentReplied():
                attempt.wait_s += event.seconds
                attempt.added += event.tokens
            case ev.AttemptMigrated():
                if event.engine not in self.loads:
                    return None
                self.loads[attempt.engine] -= 1
                self.loads[event.engine] += 1
                attempt.engine = event.engine
                self._bind(attempt, event.engine)
        return attempt

    def _ended(
        self,
        attempt: Attempt,
        event: ev.AttemptGraded
        | ev.AttemptAborted
        | ev.AttemptFailed
        | ev.GradingFailed
        | ev.EpisodeFailed,
    ) -> Attempt | None:
        match event:
            case ev.AttemptGraded():
                awaited = attempt.stage is Stage.GRADING
            case ev.AttemptAborted():
                awaited = attempt.stage is Stage.STOPPING
            case _:
                awaited = attempt.stage not in (Stage.GRADED, Stage.LOST, Stage.OVER)
        if not awaited:
            return None
        if isinstance(event, ev.AttemptGraded):
            self._leave(attempt, Stage.GRADED)
            attempt.reward = event.reward
        else:
            self._leave(attempt, Stage.OVER)
        return attempt

    def _lost(self, event: ev.DevicesLost) -> None:
        for attempt in list(self.running.values()):
            if attempt.engine in event.engines:
                self._leave(attempt, Stage.LOST)
            elif attempt.bound in event.engines:
                self._bind(attempt, attempt.engine)
        for engine in event.engines:
            self.loads.pop(engine, None)
            self.bound.pop(engine, None)
            self._idle(engine)

    def _started(self, decision: do.StartAttempt) -> None:
        id_, prompt, engine = decision.attempt, decision.prompt, decision.engine
        group = self.groups.get(prompt)
        if group is None:
            group = self.groups[prompt] = []
        place = group[0].place if group else len(self.groups) - 1
        attempt = Attempt(id_, prompt, decision.index, place, engine, engine)
        group.append(attempt)
        self.attempts[id_] = self.running[id_] = attempt
        self.loads[engine] += 1
        self.bound[engine] += 1
        if self.bound[engine] == 1:
            self.busy += 1

    def _leave(self, attempt: Attempt, stage: Stage) -> None:
        before, attempt.stage = attempt.stage, stage
        if before is Stage.RUNNING:
            del self.running[attempt.id]
            self.loads[attempt.engine] -= 1
            self._unbind(attempt.bound)
        elif before is Stage.GRADING:
            self.grading -= 1
        elif before is Stage.STOPPING:
            self.stopping -= 1

    def _bind(self, attempt: Attempt, engine: EngineId) -> None:
        self.bound[engine] += 1
        if self.bound[engine] == 1:
            self.busy += 1
        self._unbind(attempt.bound)
        attempt.bound = engine

    def _unbind(self, engine: EngineId) -> None:
        self.bound[engine] -= 1
        if self.bound[engine] == 0:
            self.busy -= 1
            self._idle(engine)

    def _idle(self, engine: EngineId) -> None:
        self.idled.extend(self._members.get(engine, (engine,)))
