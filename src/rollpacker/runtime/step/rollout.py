"""The real driver of one job's policy: engines, graders and replicas, wherever they are.

``perform`` never waits: it starts work whose outcome comes back as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.base import SamplingParams
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.runtime.attempts.carried import CarriedResponses
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, in_one_line, spawn
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.pool.pool import Listener, Loss
from rollpacker.runtime.step.decoding import DraftSources
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.runtime.step.grading import Graders
from rollpacker.runtime.step.phase_nodes import PhaseNodes
from rollpacker.runtime.step.publishing import Publishing
from rollpacker.runtime.step.sampling import Sampling
from rollpacker.runtime.step.step import DroppedError, StepRecord
from rollpacker.runtime.step.updates import Updates


class Rollout:
    """Performs the policy's decisions and tells it what happened.

    A step is ``with step(n)``: ``generate``, ``train``, ``publish``.

    Args:
        config: the run's.
        policy: decides.
        workers: engines and replicas.
        problems: prompts, rows and the order in which they are drawn.
        rewards: grades responses.
        updates: sums gradients and changes the weights.
        params: how responses are sampled.
        journal: records every event.
        clock: seconds since the run began.
        phases: gives nodes to sum gradients on when the rollout is over; None: its own.
        episodes: the attempts' environments; None where they have none.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: RolloutPolicy,
        *,
        workers: Workers,
        problems: Problems,
        rewards: Graders,
        updates: Updates,
        params: SamplingParams,
        journal: JournalWriter,
        clock: Clock,
        phases: PhaseNodes | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self._episodes = episodes
        self._workers = workers
        self._problems = problems
        self._rewards = rewards
        self._updates = updates
        self._clock = clock
        self._phases = phases
        self._summed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        carries = config.rollout.tail_batching.carries
        self.carried = CarriedResponses(config.rollout.num_generations) if carries else None
        self._measures = config.rollout.planner != "off"
        self._speculates = policy.speculates
        self._sampling = Sampling(
            policy,
            workers=workers,
            problems=problems,
            rewards=rewards,
            params=params,
            seed=config.seed,
            clock=clock,
            record=journal.record,
            fail=self.fail,
            lockstep=config.deterministic,
            carried=self.carried,
            hints=DraftSources() if self._speculates else None,
            episodes=episodes,
        )
        self._sampling.performers |= self._table()
        self._milestones: list[asyncio.Future[None]] = []
        self._publishing: Publishing | None = None
        self.record = StepRecord(step=0, start_s=0.0)

    def _table(self) -> dict[type[do.Decision], Callable[[Any], None]]:
        """What performs the decisions that are not of a single response."""
        return {
            do.DrawPrompts: self._draw,
            do.BeginRound: self._begin_round,
            do.AcceptGroup: self._accept,
            do.DropGroup: self._drop_group,
            do.DeferPrompt: self._defer,
            do.OfferTail: self._offer_tail,
            do.AccumulateGradients: self._accumulate,
            do.FinishRollout: self._finish_rollout,
            do.ApplyUpdate: self._updates.apply,
            do.PublishWeights: self._publish,
        }

    # The step ---------------------------------------------------------------------------------

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One synchronous step: every token is sampled from the weights of this step.

        Raises ``WorkerError`` when there is no worker; inside, each of the three raises
        ``WorkerError`` when one dies and no other can take over, ``DroppedError`` after ``drop``.
        """
        if not self._workers.engines or not self._workers.replicas:
            kind = "replica" if self._workers.engines else "engine"
            raise WorkerError("; ".join([*self._workers.unheard(), f"no {kind} is left"]))
        loop = asyncio.get_running_loop()
        faults = self._workers.unheard()
        self.record = StepRecord(
            step=step, start_s=self._clock(), faults=faults, fleet=self._workers.fleet
        )
        self._milestones = [loop.create_future() for _ in range(3)]
        self._generated, self._trained, self._published = self._milestones
        self._publishing = None
        self._updates.begin(self.record, self._finish_update)
        if self.carried is not None:
            self.carried.begin()
        self._workers.meet()
        guarded = self._sampling.guarded
        listener = Listener(
            guarded(self._take_engine), guarded(self._take_replica), self._hear_of_loss
        )
        with self._sampling.step(self.record, self._published, listener):
            yield

    async def generate(self) -> None:
        """Sample and grade the step's groups; gradients of complete ones may start meanwhile."""
        self._sampling.post(
            ev.StepStarted(
                step=self.record.step,
                engines=self._workers.engines,
                replicas=self._workers.replicas,
                remaining=self._problems.remaining(),
            )
        )
        self._sampling.settle()
        await self._generated

    async def train(self) -> None:
        """Sum the gradients that are left, and update the weights."""
        await self._trained

    async def publish(self) -> None:
        """Bring the new weights to the engines."""
        await self._published
        said = [] if self._episodes is None else self._episodes.said()
        self.record.faults[:0] = [*self._rewards.end_step(), *said]
        self.record.end_s = self._clock()

    def end_epoch(self, epoch: int) -> None:
        """The data is used up; what is still queued is dropped."""
        if self.carried is not None:
            self.carried.clear()
        self._sampling.post(ev.EpochEnded(epoch=epoch))

    def release_tail(self) -> None:
        """Another job has the nodes: the tail is to leave most of them."""
        if self._milestones and not self._trained.done():
            self._sampling.post(ev.TailReleased())

    def drop(self) -> None:
        """Give the running step up, if there is one and its update has not begun."""
        if self._milestones and not self._trained.done() and not self._updates.begun:
            self.fail(DroppedError("the step was dropped"))

    def fail(self, error: Exception) -> None:
        """End the step that is running, if one is, with an error; what comes later is not heard."""
        for milestone in self._milestones:
            if not milestone.done():
                milestone.set_exception(error)
                milestone.exception()  # who waits for the first of them need not ask the others

    # What the policy decided ------------------------------------------------------------------

    def _draw(self, decision: do.DrawPrompts) -> None:
        self._sampling.post(ev.PromptsDrawn(prompts=self._problems.draw(decision.counts)))

    def _begin_round(self, decision: do.BeginRound) -> None:
        self.record.kind = decision.round

    def _accept(self, decision: do.AcceptGroup) -> None:
        self._updates.accept(self.record.accept(decision))

    def _drop_group(self, decision: do.DropGroup) -> None:
        self.record.drop(decision)

    def _defer(self, decision: do.DeferPrompt) -> None:
        self.record.deferred.append(decision.prompt.id)

    def _accumulate(self, decision: do.AccumulateGradients) -> None:
        self._updates.accumulate(decision.replica, decision.parts)

    def _offer_tail(self, _decision: do.OfferTail) -> None:
        if self._phases is not None:
            self._begin(self._phases.offer_tail())

    def _finish_rollout(self, _decision: do.FinishRollout) -> None:
        self.record.rollout_end_s = self._clock()
        if self.carried is not None:
            record = self.record
            self.carried.keep(record.attempts.values(), set(record.deferred), record.step)
        self._updates.rollout_over()
        if self._phases is not None:
            self._updates.hold()
            self._begin(self._switch(self._phases))
        if not self._generated.done():
            self._generated.set_result(None)

    def _begin(self, work: Any) -> None:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _switch(self, phases: PhaseNodes) -> None:
        """From the rollout's nodes to those of training, when streamed gradients are summed."""
        try:
            while self._updates.summing:
                self._summed.clear()
                await self._summed.wait()
            await phases.begin("train")
            self._updates.release()
        except Exception as error:
            self.fail(in_one_line(error))

    def _finish_update(self, update: int, last: bool) -> None:
        self._sampling.post(ev.UpdateApplied(step=self.record.step, update=update))
        if last and not self._trained.done():
            self._trained.set_result(None)

    def _publish(self, decision: do.PublishWeights) -> None:
        def done() -> None:
            if self._measures:
                self._sampling.post(self.record.measured())
            if self._speculates and (timed := self.record.timed()) is not None:
                self._sampling.post(timed)
            self._sampling.post(ev.WeightsPublished(version=decision.version))
            if not self._published.done():
                self._published.set_result(None)

        self._publishing = Publishing(self._workers, decision.version, done)

    # What happened ----------------------------------------------------------------------------

    def _take_engine(self, engine: EngineId, report: msg.EngineReport) -> None:
        if isinstance(report, msg.WeightsLoaded | msg.Slept):
            self.record.add_work(engine, report.work)
        if self._publishing is None or not self._publishing.take_engine(engine, report):
            self._sampling.take(engine, report)

    def _take_replica(self, replica: ReplicaId, report: msg.ReplicaReport) -> None:
        match report:
            case msg.Accumulated():
                self._updates.accumulated(replica, report)
                self._summed.set()
                seconds = round(self._clock.at(report.end_s) - self._clock.at(report.start_s), 6)
                self._sampling.post(
                    ev.GradientsAccumulated(replica=replica, parts=report.parts, seconds=seconds)
                )
            case msg.ScoredSamples():
                self._updates.scored(replica, report)
            case msg.Applied():
                self._updates.applied(replica, report)
            case _:
                assert self._publishing is not None
                self._publishing.take_replica(report)

    def _hear_of_loss(self, loss: Loss) -> None:
        self.record.faults.append(str(loss))
        self._sampling.guarded(self._lose)(loss)

    def _nobody_left(self, loss: Loss) -> str | None:
        """Why the run cannot go on without what was lost."""
        if not self._workers.engines:
            return "no engine is left"
        if not self._workers.replicas:
            return "no replica is left"
        if self._updates.applying and loss.replicas:
            return "the update that was under way may have changed some of the weights"
        return None

    def _lose(self, loss: Loss) -> None:
        if (nobody := self._nobody_left(loss)) is not None:
            self.fail(WorkerError(f"{loss.text}; {nobody}"))
            return
        self._sampling.hurry()  # what was meant for the lost is lost with them
        for replica in loss.replicas:
            self._updates.lose(replica)
        self._summed.set()
        self._workers.meet()
        self._sampling.lose(loss)
        if self._publishing is not None:
            self._publishing.lose(loss)
