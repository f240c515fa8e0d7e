"""Held-out problems: all answers start at once, and failures are retried on another engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, PromptId, RoundKind
from rollpacker.policy.ledger import Attempt, Ledger, LedgerWriter


class EvaluationPolicy:
    """Assigns answers to engines. A failed answer is retried ``retries`` times."""

    def __init__(self, prompts: Sequence[PromptId], answers: int, retries: int) -> None:
        self._prompts = prompts
        self._each = answers
        self._retries = retries
        self._writer = LedgerWriter()
        self._ledger: Ledger = self._writer
        self._step = 0
        self._failures = Counter[tuple[PromptId, int]]()
        # Negative, so that no id is that of a training attempt.
        self._ids = count(-1, -1)

    @property
    def answers(self) -> int:
        return len(self._prompts) * self._each

    @property
    def missing(self) -> int:
        return len(self._ledger.running) + self._ledger.grading

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        del now
        made: list[do.Decision] = []
        for decision in self._decide(event, self._writer.take(event)):
            self._writer.follow(decision)
            made.append(decision)
        if not self.missing:
            made.append(do.FinishRollout(step=self._step, round=RoundKind.FULL))
        return made

    def _decide(self, event: ev.Event, of: Attempt | None) -> Iterator[do.Decision]:
        match event:
            case ev.StepStarted(step=step, engines=engines):
                self._step = step
                for place, prompt in enumerate(self._prompts):
                    for index in range(self._each):
                        yield self._start(prompt, index, engines[place % len(engines)])
            case ev.DevicesLost(engines=engines):
                for each in [a for engine in engines for a in self._ledger.lost_with(engine)]:
                    yield self._start(each.prompt, each.index, self._idlest())
            case _ if of is not None:
                yield from self._go_on(event, of)
            case _:
                pass

    def _go_on(self, event: ev.Event, of: Attempt) -> Iterator[do.Decision]:
        match event:
            case ev.TurnFinished():
                yield do.StepEnvironment(attempt=of.id)
            case ev.EnvironmentReplied():
                yield do.ContinueAttempt(attempt=of.id, engine=of.engine)
            case ev.AttemptFinished():
                yield do.GradeAttempt(attempt=of.id)
            case ev.EpisodeFailed(blameless=True):
                yield self._start(of.prompt, of.index, of.engine)
            case ev.AttemptFailed():
                self._failures[of.prompt, of.index] += 1
                if self._failures[of.prompt, of.index] <= self._retries:
                    yield self._start(of.prompt, of.index, self._next(of.engine))
            case _:
                pass

    def _start(self, prompt: PromptId, index: int, engine: EngineId) -> do.Decision:
        id_ = AttemptId(next(self._ids))
        return do.StartAttempt(attempt=id_, prompt=prompt, index=index, engine=engine)

    def _idlest(self) -> EngineId:
        loads = self._ledger.loads
        return min(loads, key=lambda engine: (loads[engine], engine))

    def _next(self, engine: EngineId) -> EngineId:
        engines = [*self._ledger.loads]
        return engines[(engines.index(engine) + 1) % len(engines)]
