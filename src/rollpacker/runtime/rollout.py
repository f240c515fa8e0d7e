"""The real driver of one job's policy: engines, rewards and trainers by way of their processes.

``perform`` never waits: it starts work whose outcome comes back as an event.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter
from rollpacker.core.pump import Pump
from rollpacker.core.types import AttemptId, WorkerId, sampling_seed
from rollpacker.engine.base import Output, Request, SamplingParams
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.reward.base import Grade
from rollpacker.runtime import messages as msg
from rollpacker.runtime.attempts import DECODING, Attempt, Stage
from rollpacker.runtime.clock import Clock
from rollpacker.runtime.graded_log import GradedLog
from rollpacker.runtime.grading import Grading
from rollpacker.runtime.phases import Phases
from rollpacker.runtime.pool import WorkerError, WorkerPool
from rollpacker.runtime.problems import Problems
from rollpacker.runtime.rewards import Rewards
from rollpacker.runtime.step import DroppedError, StepRecord
from rollpacker.runtime.updates import Updates


class Rollout:
    """Performs the policy's decisions and tells it what happened.

    Args:
        config: the run's.
        policy: decides.
        pool: the workers.
        problems: prompts, rows and the order in which they are drawn.
        rewards: grades responses.
        updates: sums gradients and changes the weights.
        params: how responses are sampled.
        journal: records every event.
        graded: keeps graded responses until the step's update, and has those of a step that was
            interrupted.
        clock: seconds since the run began.
        phases: gives nodes to sum gradients on when the rollout is over; None: its own.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: RolloutPolicy,
        *,
        pool: WorkerPool,
        problems: Problems,
        rewards: Rewards,
        updates: Updates,
        params: SamplingParams,
        journal: JournalWriter,
        graded: GradedLog,
        clock: Clock,
        phases: Phases | None = None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._pool = pool
        self._problems = problems
        self._rewards = rewards
        self._updates = updates
        self._params = params
        self._graded = graded
        self._clock = clock
        self._phases = phases
        self._summed = asyncio.Event()
        self._switching: asyncio.Task[None] | None = None
        self._offering: asyncio.Task[None] | None = None
        self._pump = Pump(policy, self._perform, clock, journal.record)
        self._lockstep = config.deterministic
        self._grading = Grading(
            rewards, problems, graded, lockstep=self._lockstep, post=self._pump.post, clock=clock
        )
        self._held: set[WorkerId] = set()
        self._outbox: dict[WorkerId, list[Request]] = defaultdict(list)
        self._stopping: dict[WorkerId, list[AttemptId]] = defaultdict(list)
        self._done: asyncio.Future[None] | None = None
        self._late: list[str] = []
        self.record = StepRecord(step=0, start_s=0.0)

    async def run_step(self, step: int) -> StepRecord:
        """One synchronous step: every token is sampled from the weights of this step.

        Raises ``WorkerError`` when a worker dies and no other can take over, ``DroppedError`` after
        ``drop``.
        """
        if not self._pool.workers:
            raise WorkerError("all workers have died")
        self.record = StepRecord(step=step, start_s=self._clock(), faults=self._late)
        self._late = []
        self._done = asyncio.get_running_loop().create_future()
        self._pool.on_report = self._guarded(self._report)
        self._pool.on_lost = self._guarded(self._lose)
        self._rewards.on_grades = self._guarded(self._take_grades)
        self._grading.begin(self.record)
        self._updates.begin(self.record, self._finish_update)
        self._pool.meet()
        self._pool.broadcast(msg.BeginStep(version=step))
        self._pump.post(
            ev.StepStarted(
                step=step, workers=self._pool.workers, remaining=self._problems.remaining()
            )
        )
        self._settle()
        await self._done
        self.record.faults[:0] = self._rewards.end_step()
        self.record.end_s = self._clock()
        return self.record

    def end_epoch(self, epoch: int) -> None:
        """The data is used up; what is still queued is dropped."""
        self._pump.post(ev.EpochEnded(epoch=epoch))

    # What the policy decided ------------------------------------------------------------------

    def _perform(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            match decision:
                case do.StartAttempt():
                    self._start(decision)
                case do.AbortAttempt():
                    self._abort(self.record.attempts[decision.attempt])
                case do.GradeAttempt():
                    self._grading.add(self.record.attempts[decision.attempt])
                case do.MigrateAttempts():
                    self._migrate(decision)
                case do.AccumulateGradients():
                    self._updates.accumulate(decision.worker, decision.parts)
                case _:
                    self._perform_rare(decision)
        self._flush()

    def _perform_rare(self, decision: do.Decision) -> None:
        record = self.record
        match decision:
            case do.DrawPrompts():
                prompts = self._problems.draw(decision.counts)
                self._pump.post(ev.PromptsDrawn(prompts=prompts))
            case do.BeginRound():
                record.kind = decision.round
            case do.AcceptGroup():
                self._updates.accept(record.accept(decision))
            case do.DropGroup():
                record.drop(decision)
            case do.DeferPrompt():
                record.deferred.append(decision.prompt.id)
            case do.FinishRollout():
                record.rollout_end_s = self._clock()
                self._updates.rollout_over()
                if self._phases is not None:
                    self._updates.hold()
                    self._switching = asyncio.create_task(self._switch(self._phases))
            case do.ApplyUpdate():
                self._updates.apply(decision)
            case do.OfferTail():
                self._offer_tail()
            case _:
                raise AssertionError(f"unknown decision {decision!r}")

    def _offer_tail(self) -> None:
        if self._phases is not None:
            self._offering = asyncio.create_task(self._phases.offer_tail())

    async def _switch(self, phases: Phases) -> None:
        """From the rollout's nodes to those of training, when streamed gradients are summed."""
        try:
            while self._updates.summing:
                self._summed.clear()
                await self._summed.wait()
            await phases.begin("train")
            self._updates.release()
        except Exception as error:
            self.fail(error)

    def _start(self, decision: do.StartAttempt) -> None:
        step = self.record.step
        request = Request(
            attempt=decision.attempt,
            group=decision.prompt,
            prompt=self._problems.tokens[decision.prompt],
            params=self._params,
            seed=sampling_seed(self._config.seed, step, decision.prompt, decision.index),
        )
        self.record.attempts[decision.attempt] = Attempt(
            id=decision.attempt,
            prompt=decision.prompt,
            index=decision.index,
            worker=decision.worker,
            request=request,
            start_s=self._clock(),
        )
        known = self._graded.find(decision.prompt, decision.index)
        if known is None:
            self._outbox[decision.worker].append(request)
        else:
            self._pump.post(self._finished(known.of(decision.attempt).output))

    def _abort(self, attempt: Attempt) -> None:
        if attempt.stage in DECODING:
            if attempt.stage is Stage.RUNNING:
                self._stopping[attempt.worker].append(attempt.id)
            attempt.stage = Stage.STOPPING
            return
        self._rewards.cancel(attempt.id)
        self._aborted(attempt)

    def _migrate(self, decision: do.MigrateAttempts) -> None:
        for id_ in decision.attempts:
            attempt = self.record.attempts[id_]
            if attempt.stage is Stage.RUNNING:
                attempt.stage, attempt.target = Stage.MIGRATING, decision.target
                self._stopping[decision.source].append(id_)
            elif attempt.stage is Stage.MIGRATING:
                attempt.target = decision.target

    def _flush(self) -> None:
        """Send what the decisions of one event gathered, one message for each process."""
        for worker, requests in self._outbox.items():
            self._pool.send(worker, msg.Submit(requests=requests))
        for worker, attempts in self._stopping.items():
            self._pool.send(worker, msg.Abort(attempts=attempts))
        self._outbox.clear()
        self._stopping.clear()
        self._grading.send()

    # What happened ----------------------------------------------------------------------------

    def _guarded(self, react: Callable[..., None]) -> Callable[..., None]:
        """Callbacks of the event loop: what they raise ends the step."""

        def call(*args: Any) -> None:
            try:
                react(*args)
            except Exception as error:
                self.fail(error)

        return call

    def release_tail(self) -> None:
        """Another job has the nodes: the tail is to leave most of them."""
        if self._done is not None and not self._done.done():
            self._pump.post(ev.TailReleased())

    def drop(self) -> None:
        """Give the running step up, if there is one and its update has not begun."""
        if self._done is None or self._done.done() or self._updates.begun:
            return
        self._pool.on_report = lambda _worker, _report: None
        self._pool.on_lost = lambda _worker, _error: None
        self._rewards.on_grades = lambda _grades: None
        self._done.set_exception(DroppedError("the step was dropped"))

    def fail(self, error: Exception) -> None:
        """End the step that is running, if one is, with an error."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _report(self, worker: WorkerId, report: msg.Report) -> None:
        match report:
            case msg.Finished():
                if self._lockstep:
                    self._held.add(worker)
                self._pump.post(*(self._finished(output) for output in report.outputs))
                self._settle()
            case msg.Aborted():
                self._pump.post(*(e for output in report.outputs for e in self._stopped(output)))
                self._flush()
                self._settle()
            case msg.Failed():
                self._pump.post(*(self._failed(a, report.error) for a in report.attempts))
                self._settle()
            case msg.Accumulated():
                self._updates.accumulated(worker, report)
                self._summed.set()
                seconds = report.end_s - report.start_s
                self._pump.post(
                    ev.GradientsAccumulated(
                        worker=worker, parts=report.parts, seconds=round(seconds, 6)
                    )
                )
            case msg.Scored():
                self._updates.scored(worker, report)
            case msg.Applied():
                self._updates.applied(worker, report)
            case _:
                raise AssertionError(f"unexpected report {report!r}")

    def _finished(self, output: Output) -> ev.Event:
        attempt = self.record.attempts[output.attempt]
        if output.weights_version != self.record.step:
            raise AssertionError(
                f"attempt {attempt.id} was sampled by weights {output.weights_version} "
                f"in step {self.record.step}"
            )
        attempt.output, attempt.end_s = output, self._clock()
        if attempt.stage is Stage.STOPPING:
            return self._abort_event(attempt)
        attempt.stage = Stage.GRADING
        return ev.AttemptFinished(
            attempt=attempt.id, tokens=attempt.tokens, finish_reason=output.finish_reason
        )

    def _stopped(self, output: Output) -> list[ev.Event]:
        attempt = self.record.attempts[output.attempt]
        if attempt.stage is Stage.STOPPING:
            attempt.output, attempt.end_s = output, self._clock()
            return [self._abort_event(attempt)]
        assert attempt.target is not None
        return [self._continue(attempt, output, attempt.target)]

    def _continue(self, attempt: Attempt, output: Output, target: WorkerId) -> ev.Event:
        """A migrating attempt has left its old worker: hand it to the new one."""
        if target not in self._pool.workers:
            return self._failed(attempt.id, f"worker {target} died")
        attempt.move(target, self._clock())
        old = attempt.request
        request = Request(
            attempt=old.attempt,
            group=old.group,
            prompt=old.prompt,
            params=old.params,
            seed=old.seed,
            generated=output.tokens,
            logprobs=output.logprobs,
        )
        self._outbox[target].append(request)
        return ev.AttemptMigrated(attempt=attempt.id, worker=target, tokens=len(output.tokens))

    def _failed(self, id_: AttemptId, error: str) -> ev.Event:
        attempt = self.record.attempts[id_]
        attempt.end_s = self._clock()
        if attempt.stage is Stage.STOPPING:
            return self._abort_event(attempt)
        attempt.stage, attempt.verdict = Stage.OVER, "failed"
        self.record.faults.append(f"attempt {id_} of prompt {attempt.prompt}: {error}")
        return ev.AttemptFailed(attempt=id_, error=error)

    def _abort_event(self, attempt: Attempt) -> ev.AttemptAborted:
        attempt.stage, attempt.verdict = Stage.OVER, "aborted"
        return ev.AttemptAborted(attempt=attempt.id, tokens=attempt.tokens)

    def _aborted(self, attempt: Attempt) -> None:
        self._pump.post(self._abort_event(attempt))

    def _take_grades(self, grades: Sequence[Grade]) -> None:
        self._grading.take(grades)
        self._settle()

    def _settle(self) -> None:
        """In lockstep, decoding goes on when all that finished is graded, in a fixed order."""
        if not self._lockstep or not self._grading.settle():
            return
        for worker in sorted(self._held):
            self._pool.send(worker, msg.Proceed())
        self._held.clear()

    def _finish_update(self, update: int, last: bool) -> None:
        self._pump.post(ev.UpdateApplied(step=self.record.step, update=update))
        assert self._done is not None
        if last and not self._done.done():
            self._done.set_result(None)

    def _lose(self, worker: WorkerId, error: str) -> None:
        assert self._done is not None
        (self._late if self._done.done() else self.record.faults).append(error)
        if not self._pool.workers or self._updates.applying:
            if not self._done.done():
                self._done.set_exception(WorkerError(error))
            return
        self._updates.lose(worker)
        self._summed.set()
        self._pool.meet()
        stopping = [
            self._abort_event(attempt)
            for attempt in self.record.attempts.values()
            if attempt.worker == worker and attempt.stage is Stage.STOPPING
        ]
        for attempt in self.record.attempts.values():
            if attempt.worker == worker and attempt.stage in DECODING:
                attempt.stage, attempt.verdict = Stage.OVER, "failed"
                attempt.end_s = self._clock()
        # First what was lost: a round that ends must know which gradients are gone.
        self._pump.post(ev.WorkerLost(worker=worker), *stopping)
        self._settle()
