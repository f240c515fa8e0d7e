"""A training step or an evaluation. ``StepDriver._until`` is its only loop over events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import Policy
from rollpacker.core.pump import Record
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.env.processes.pool import EpisodeReply
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.runtime.attempts.attempts import GENERATING
from rollpacker.runtime.attempts.carried import CarriedResponses, nothing_known
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, in_one_line, spawn
from rollpacker.runtime.pool.pool import Listener, Loss
from rollpacker.runtime.step.phase_nodes import PhaseNodes
from rollpacker.runtime.step.publishing import Publishing
from rollpacker.runtime.step.responses import Decoding, DraftSources, Grading, Setup
from rollpacker.runtime.step.step import DroppedError, StepRecord
from rollpacker.runtime.step.updates import Updates

_SLICE = 1024
"""Decisions before the event loop's next turn, as a large step begins with thousands."""


class StepDriver:
    """Feeds events to a policy, performs its decisions, and awaits the next event.

    Args:
        updates: sums gradients and changes the weights. None for an evaluation.
        phases: brings nodes for gradients after the rollout. None: the job's own nodes.
        carried: responses of the last round's losers. None if they begin again.
        drafts: texts for drafts. None without speculative decoding.
        measures: whether the policy gets the engines' measurements of a round.
    """

    def __init__(
        self,
        setup: Setup,
        policy: Policy,
        journal: Record,
        *,
        updates: Updates | None = None,
        phases: PhaseNodes | None = None,
        carried: CarriedResponses | None = None,
        drafts: DraftSources | None = None,
        measures: bool = False,
    ) -> None:
        self._setup, self._policy, self._journal = setup, policy, journal
        self._workers, self._clock, self._episodes = setup.workers, setup.clock, setup.episodes
        self._updates, self._phases, self.carried = updates, phases, carried
        self._drafts, self._measures = drafts, measures
        known = nothing_known if carried is None else carried.find
        self._decoding = Decoding(setup, known, drafts, self._post)
        self._grading = Grading(setup, known, self._post)
        self._publishing: Publishing | None = None
        self._events = deque[ev.Event]()
        self._heard = deque[tuple[Callable[..., None], tuple[Any, ...]]]()
        """Reports that are not events yet, each with its handler."""
        self._more, self._summed = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.record = StepRecord(step=0, start_s=0.0)

    # The step -----------------------------------------------------------------------------------

    async def step(self, step: int) -> StepRecord:
        """Sample, grade, learn, publish. This step's weights sample all of its tokens. Raises
        ``WorkerError`` if a worker dies and no other can take over, ``DroppedError`` after
        ``drop``, and ``ValueError`` for an error that would repeat."""
        with self.begin(step):
            await self.roll_out()
            await self.learn()
        return self.record

    async def roll_out(self) -> None:
        """Run until every group is decided. Gradients of complete groups may start meanwhile."""
        await self._until(do.FinishRollout)

    async def learn(self) -> None:
        """Run until every engine has the new weights."""
        await self._until(ev.WeightsPublished)
        said = [] if self._episodes is None else self._episodes.said()
        self.record.faults[:0] = [*self._setup.rewards.end_step(), *said]
        self.record.end_s = self._clock()

    async def _until(self, last: type[ev.Event | do.Decision]) -> None:
        """Handle events until one of the kind ``last`` was handled, or such a decision performed. A
        report becomes an event after all consequences of the report before it, so a journal
        replays."""
        over = False
        try:
            while not over:
                while self._events:
                    event = self._events.popleft()
                    decisions = self._decide(event)
                    for number, decision in enumerate(decisions, start=1):
                        self._perform(decision)
                        if number % _SLICE == 0 and not self._setup.lockstep:
                            await asyncio.sleep(0)
                    over = over or last in (type(event), *map(type, decisions))
                    if not self._events:
                        self._decoding.send()
                        self._grading.send()
                self._settle()
                if not (over or self._events):
                    take, report = await self._hear_next()
                    take(*report)
        except (ValueError, RuntimeError, OSError):
            raise
        except Exception as error:
            raise in_one_line(error) from error

    def _decide(self, event: ev.Event) -> list[do.Decision]:
        now = self._clock()
        decisions = [*self._policy.handle(now, event)]
        self._journal(now, event, decisions)
        return decisions

    def _perform(self, decision: do.Decision) -> None:
        """Start a decision without waiting. Its outcome is an event."""
        attempts = self.record.attempts
        match decision:
            case do.StartAttempt():
                self._decoding.start(decision)
            case do.StepEnvironment():
                self._decoding.step_environment(attempts[decision.attempt])
            case do.ContinueAttempt():
                self._decoding.go_on(attempts[decision.attempt], decision.engine)
            case do.AbortAttempt():
                self._abort(decision)
            case do.MigrateAttempts():
                self._decoding.migrate(decision)
            case do.GradeAttempt():
                self._grading.add(attempts[decision.attempt])
            case do.FormEngine() | do.SleepEngine() | do.Speculate():
                self._decoding.change(decision)
            case do.FinishRollout():
                self._finish_rollout()
            case _:
                assert self._updates is not None
                self._train(decision, self._updates)

    def _train(self, decision: do.Decision, updates: Updates) -> None:
        record = self.record
        match decision:
            case do.DrawPrompts():
                self._post(ev.PromptsDrawn(prompts=self._setup.problems.draw(decision.counts)))
            case do.BeginRound():
                record.kind = decision.round
            case do.AcceptGroup():
                updates.accept(record.accept(decision))
            case do.DropGroup():
                record.drop(decision)
            case do.DeferPrompt():
                record.deferred.append(decision.prompt.id)
            case do.AccumulateGradients() | do.ApplyUpdate():
                updates.perform(decision)
            case do.PublishWeights():
                self._publishing = Publishing(self._workers, decision.version, self._published)
            case do.OfferTail() if self._phases is not None:
                self._spawn(self._phases.offer_tail())
            case _:
                pass

    def _settle(self) -> None:
        """In lockstep, let engines go on when environments have answered all turns and all
        responses are graded. So a step's result depends on no time."""
        if self._heard:
            return  # a grade or an answer may wait there
        if self._episodes is not None:
            if answers := self._episodes.settle():
                self._decoding.answered(answers)
            if self._events or self._episodes.acting:
                return
        if self._setup.lockstep and self._grading.settle() and not self._events:
            self._decoding.proceed()

    # From its beginning to its end --------------------------------------------------------------

    @contextmanager
    def begin(self, step: int) -> Iterator[None]:
        """Listen to workers, rewards and environments during a step, or an evaluation of that
        version. Raises ``WorkerError`` if no worker is left."""
        workers, updates = self._workers, self._updates
        if (nobody := self._nobody_left()) is not None:
            raise self._lost("; ".join([*workers.unheard(), nobody]))
        self.record = StepRecord(
            step=step,
            start_s=self._clock(),
            training=updates is not None,
            faults=workers.unheard() if updates is not None else [],
            fleet=workers.fleet,
        )
        self._publishing = None
        if updates is not None:
            updates.begin(self.record, self._post)
            workers.meet()
        if self.carried is not None:
            self.carried.begin()
        self._events.clear()
        self._heard.clear()
        self._grading.begin(self.record)
        self._decoding.begin(self.record)
        self._post(
            ev.StepStarted(
                step=step,
                engines=workers.engines,
                replicas=workers.replicas,
                remaining=self._setup.problems.remaining(),
            )
        )
        with ExitStack() as stack:
            engine, replica = self._to(self._take_engine), self._to(self._take_replica)
            stack.enter_context(workers.listen(Listener(engine, replica, self._hear_of_loss)))
            stack.enter_context(self._setup.rewards.listen(self._to(self._grading.take)))
            if self._episodes is not None:
                stack.enter_context(self._episodes.listen(self._to(self._take_replies)))
            yield

    def end_epoch(self, epoch: int) -> None:
        """Between steps, end the epoch and drop queued prompts."""
        if self.carried is not None:
            self.carried.clear()
        self._decide(ev.EpochEnded(epoch=epoch))

    def release_tail(self) -> None:
        """Another job has the nodes, so the tail must leave most of them."""

        def release() -> None:
            if self._updates is not None and not self._updates.over:
                self._post(ev.TailReleased())

        self._hear(release)

    def drop(self, what: str) -> None:
        """Drop the running step, unless an update has begun."""

        def give_up() -> None:
            if self._updates is None or not (self._updates.begun or self._updates.over):
                raise DroppedError(f"{what} was dropped")

        self._hear(give_up)

    # What is heard ------------------------------------------------------------------------------

    def _post(self, *events: ev.Event) -> None:
        self._events.extend(events)

    def _hear(self, take: Callable[..., None], *report: Any) -> None:
        self._heard.append((take, report))
        self._more.set()

    def _to(self, take: Callable[..., None]) -> Callable[..., None]:
        """A callback whose reports wait for their turn."""
        return lambda *report: self._hear(take, *report)

    async def _hear_next(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        while not self._heard:
            self._more.clear()
            await self._more.wait()
        return self._heard.popleft()

    def _hear_of_loss(self, loss: Loss) -> None:
        """Take a loss before all reports except those of updates, and drop the lost workers'
        reports. No decision may rely on a lost engine or lost gradients. An update that every
        replica has made holds."""
        waiting, self._heard = self._heard, deque()
        updated: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for take, report in waiting:
            if take == self._lose:
                loss = _both(report[0], loss)
            elif take == self._take_replica and isinstance(report[1], msg.Applied):
                updated.append((take, report))
            elif not (
                (take == self._take_engine and report[0] in loss.engines)
                or (take == self._take_replica and report[0] in loss.replicas)
            ):
                self._heard.append((take, report))
        self._heard.extendleft(reversed([*updated, (self._lose, (loss,))]))
        self._more.set()

    def _take_engine(self, engine: EngineId, report: msg.EngineReport) -> None:
        if isinstance(report, msg.WeightsLoaded | msg.Slept):
            self.record.add_work(engine, report.work)
        if self._publishing is None or not self._publishing.take_engine(engine, report):
            self._decoding.take(engine, report)

    def _take_replica(self, replica: ReplicaId, report: msg.ReplicaReport) -> None:
        if self._updates is None:
            return
        match report:
            case msg.Accumulated():
                self._updates.accumulated(replica, report)
                self._summed.set()
            case msg.ScoredSamples():
                self._updates.scored(replica, report)
            case msg.Applied():
                self._updates.applied(replica, report)
            case _:
                assert self._publishing is not None
                self._publishing.take_replica(report)

    def _take_replies(self, replies: Sequence[EpisodeReply]) -> None:
        assert self._episodes is not None
        self._decoding.answered(self._episodes.take(replies))

    def _lose(self, loss: Loss) -> None:
        self.record.faults.append(str(loss))
        nobody = self._nobody_left()
        if loss.replicas and self._updates is not None and self._updates.applying:
            nobody = nobody or "the update that was under way may have changed some of the weights"
        if nobody is not None:
            raise self._lost(f"{loss.text}; {nobody}")
        if self._updates is not None:
            for replica in loss.replicas:
                self._updates.lose(replica)
            self._workers.meet()
        self._summed.set()
        stopping = [event for engine in loss.engines for event in self._decoding.lose(engine)]
        # The loss comes first: a round that ends must know which gradients are gone.
        self._post(ev.DevicesLost(engines=loss.engines, replicas=loss.replicas), *stopping)
        if self._publishing is not None:
            self._publishing.lose(loss)

    def _nobody_left(self) -> str | None:
        if not self._workers.engines:
            return "no engine is left"
        if self._updates is not None and not self._workers.replicas:
            return "no replica is left"
        return None

    def _lost(self, why: str) -> WorkerError:
        return WorkerError(why if self._updates is not None else f"evaluation: {why}")

    # What was decided ---------------------------------------------------------------------------

    def _abort(self, decision: do.AbortAttempt) -> None:
        attempt = self.record.attempts[decision.attempt]
        if attempt.stage in GENERATING:
            self._decoding.abort(attempt)
        else:
            self._setup.rewards.cancel(attempt.id)
            self._post(self._decoding.aborted(attempt))

    def _finish_rollout(self) -> None:
        record, updates = self.record, self._updates
        record.rollout_end_s = self._clock()
        if self.carried is not None:
            self.carried.keep(record.attempts.values(), set(record.deferred), record.step)
        if updates is not None:
            updates.rollout_over(hold=self._phases is not None)
            if self._phases is not None:
                self._spawn(self._switch(updates, self._phases))

    def _spawn(self, work: Any) -> None:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _switch(self, updates: Updates, phases: PhaseNodes) -> None:
        """Go to training nodes when streamed gradients are summed."""
        try:
            while updates.summing:
                self._summed.clear()
                await self._summed.wait()
            await phases.begin("train")
            self._hear(updates.release)
        except Exception as error:
            self._hear(_raise, error)

    def _published(self) -> None:
        if self._measures:
            self._post(self.record.measured())
        if self._drafts is not None and (timed := self.record.timed()) is not None:
            self._post(timed)
        self._post(ev.WeightsPublished(version=self.record.step + 1))


def _both(first: Loss, second: Loss) -> Loss:
    return Loss(
        engines=tuple(sorted({*first.engines, *second.engines})),
        replicas=tuple(sorted({*first.replicas, *second.replicas})),
        text=f"{first.text}; {second.text}",
    )


def _raise(error: Exception) -> None:
    raise error


def train_driver(
    config: RunConfig,
    setup: Setup,
    policy: RolloutPolicy,
    journal: Record,
    updates: Updates,
    phases: PhaseNodes | None = None,
) -> StepDriver:
    """The driver of a run's training steps."""
    carries = config.rollout.tail_batching.carries
    return StepDriver(
        setup,
        policy,
        journal,
        updates=updates,
        phases=phases,
        carried=CarriedResponses(config.rollout.num_generations) if carries else None,
        drafts=DraftSources() if policy.speculates else None,
        measures=config.rollout.planner != "off",
    )
