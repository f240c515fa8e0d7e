"""Responses as a policy decides: decoded, answered by environments, graded; it is told of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import Policy
from rollpacker.core.pump import Pump, Record
from rollpacker.core.types import EngineId
from rollpacker.engine.base import SamplingParams
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import GENERATING
from rollpacker.runtime.attempts.carried import CarriedResponses, nothing_known
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import in_one_line
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.pool.pool import Listener, Loss
from rollpacker.runtime.step.decoding import Decoding, DraftSources
from rollpacker.runtime.step.episodes import Answered, Episodes
from rollpacker.runtime.step.grading import Graders, Grading
from rollpacker.runtime.step.step import StepRecord


class Sampling:
    """Performs what a policy decides of responses, and ``performers`` all else.

    Args:
        policy: decides.
        record: takes every event and what was decided.
        fail: takes what ends the step.
        carried: has what losers of the last round had; None where they begin again.

    The others are those of ``Decoding`` and ``Grading``.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        workers: Workers,
        problems: Problems,
        rewards: Graders,
        params: SamplingParams,
        seed: int,
        clock: Clock,
        record: Record,
        fail: Callable[[Exception], None],
        lockstep: bool,
        carried: CarriedResponses | None = None,
        hints: DraftSources | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        known = nothing_known if carried is None else carried.find
        self._workers = workers
        self._rewards = rewards
        self._episodes = episodes
        self._fail = fail
        self._lockstep = lockstep
        later = None if lockstep else self._perform_later
        self._pump = Pump(policy, self._perform, clock, record, self._send, later)
        self.post, self.hurry = self._pump.post, self._pump.hurry
        self._decoding = Decoding(
            workers,
            problems,
            known,
            params,
            seed,
            lockstep=lockstep,
            hints=hints,
            episodes=episodes,
            post=self.post,
            clock=clock,
        )
        self._grading = Grading(
            rewards,
            problems,
            known=known,
            lockstep=lockstep,
            post=self.post,
            clock=clock,
        )
        self.performers: dict[type[do.Decision], Callable[[Any], None]] = {
            do.StartAttempt: self._decoding.start,
            do.StepEnvironment: self._decoding.step_environment,
            do.ContinueAttempt: self._decoding.go_on,
            do.AbortAttempt: self._abort,
            do.MigrateAttempts: self._decoding.migrate,
            do.FormEngine: self._decoding.form,
            do.SleepEngine: self._decoding.sleep,
            do.Speculate: self._decoding.speculate,
            do.GradeAttempt: self._grade,
        }

    @contextmanager
    def step(
        self, record: StepRecord, over: asyncio.Future[None], listener: Listener
    ) -> Iterator[None]:
        """Fill in ``record`` until ``over``; ``listener`` hears the workers."""
        self._record, self._over = record, over
        self._pump.clear()
        self._grading.begin(record)
        self._decoding.begin(record)
        with ExitStack() as stack:
            stack.enter_context(self._workers.listen(listener))
            stack.enter_context(self._rewards.listen(self.guarded(self._take_grades)))
            if self._episodes is not None:
                stack.enter_context(self._episodes.listen(self.guarded(self._take_answers)))
            yield

    # What the policy decided ------------------------------------------------------------------

    def _perform(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            self.performers[type(decision)](decision)

    def _perform_later(self, go_on: Callable[[], None]) -> None:
        """Unless the step has failed by then."""
        record = self._record

        def call() -> None:
            if self._record is record:
                go_on()

        asyncio.get_running_loop().call_soon(self.guarded(call))

    def _send(self) -> None:
        self._decoding.send()
        self._grading.send()

    def _abort(self, decision: do.AbortAttempt) -> None:
        attempt = self._record.attempts[decision.attempt]
        if attempt.stage in GENERATING:
            self._decoding.abort(attempt)
        else:
            self._rewards.cancel(attempt.id)
            self.post(self._decoding.aborted(attempt))

    def _grade(self, decision: do.GradeAttempt) -> None:
        self._grading.add(self._record.attempts[decision.attempt])

    # What happened ----------------------------------------------------------------------------

    def guarded(self, react: Callable[..., None]) -> Callable[..., None]:
        """Callbacks of the event loop: what they raise ends the step."""

        def call(*args: Any) -> None:
            if self._over.done():
                return
            try:
                react(*args)
            except Exception as error:
                self._fail(in_one_line(error))

        return call

    def take(self, engine: EngineId, report: msg.EngineReport) -> None:
        """An engine's report on responses."""
        self._decoding.take(engine, report)
        self.settle()

    def _take_grades(self, grades: Sequence[Grade]) -> None:
        self._grading.take(grades)
        self.settle()

    def _take_answers(self, answers: Sequence[Answered]) -> None:
        self._decoding.answered(answers)
        self.settle()

    def settle(self) -> None:
        """In lockstep, decoding goes on when environments have answered all turns and all that
        finished is graded, in a fixed order."""
        answered = self._episodes is None or self._episodes.settle()
        if self._lockstep and answered and self._grading.settle():
            self._decoding.proceed()

    def lose(self, loss: Loss) -> None:
        """Engines are gone, and what they ran."""
        self.hurry()  # what was meant for the lost is lost with them
        stopping = [event for engine in loss.engines for event in self._decoding.lose(engine)]
        # First what was lost: a round that ends must know which gradients are gone.
        lost = ev.DevicesLost(engines=loss.engines, replicas=loss.replicas)
        self.post(lost, *stopping)
        self.settle()
